"""The prompt of a conversation's next turn: the history's tokens, then the new messages' tokens."""

from __future__ import annotations

import json
import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol, final

from jaxserve.conversations.turns import History, Message
from jaxserve.core.errors import EmptyPromptError, InvalidRequestError
from jaxserve.core.request import Sample, check_messages

if TYPE_CHECKING:
    from jaxserve.models.thinking import Thinking
    from jaxserve.models.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

Said = str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | Sequence[int]


class Render(Protocol):
    """Tokenizes chats, for instance with tools."""

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        """Return the tokens of a chat up to the next answer."""
        ...

    def continuation(
        self,
        asked: Sequence[Mapping[str, Any]],
        answer: Mapping[str, Any],
        new: Sequence[Mapping[str, Any]],
    ) -> Sequence[int] | None:
        """Return the tokens that follow an answer, as `ChatTemplate.continuation` does."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class NextPrompt:
    """The prompt of a turn.

    The history has its first `num_kept` tokens. `messages` is None if the turn is token ids.
    """

    token_ids: tuple[int, ...]
    num_kept: int
    messages: tuple[Message, ...] | None


def next_prompt(
    tokenizer: Tokenizer | None,
    history: History,
    start: Sequence[Message],
    said: Said,
    render: Render | None = None,
    variables: Mapping[str, Any] | None = None,
) -> NextPrompt:
    """Return the prompt that continues `history` with `said`.

    It begins with the history's tokens, unchanged. If the chat template now writes earlier turns
    differently, all messages are tokenized again, and a warning is logged.

    Args:
      start: messages before those of the first turn.
      said: a text, which becomes the user's message; one or several messages; or token ids, which
        follow the history directly.
      render: writes the messages; by default the chat template does, without tools. If it differs
        from the newest prompt that was tokenized as a whole, it tokenizes all messages.
      variables: those of the chat template, without `render`.

    Raises:
      InvalidRequestError: one of its subclasses.
    """
    messages, token_ids = _parsed(said)
    if messages is None and variables:
        raise InvalidRequestError(
            "template_kwargs are variables of a chat template, and this turn is of token ids; "
            "leave them out"
        )
    if messages is None:
        if start or (history.turns and history.is_chat):
            raise InvalidRequestError(
                "token ids cannot go on a conversation of messages; give text or messages, or "
                "begin a conversation of token ids"
            )
        kept = history.token_ids
        return NextPrompt(token_ids=(*kept, *token_ids), num_kept=len(kept), messages=None)
    if tokenizer is None:
        raise InvalidRequestError(
            "a conversation of messages needs a tokenizer and this runtime has none; give token "
            "ids, or pass tokenizer= to Runtime"
        )
    is_plain = render is None and not variables
    render = render or _Template(tokenizer, variables)
    if not history.turns:
        messages = (*start, *messages)
        whole = render.prompt(messages)
        return NextPrompt(token_ids=tuple(whole), num_kept=0, messages=messages)
    if not history.is_chat:
        raise InvalidRequestError(
            "this conversation is of token ids, and messages cannot go on with it; give token ids, "
            "or begin another conversation"
        )
    is_same = is_plain or _is_written_by(render, history)
    added = _continuation(tokenizer, history, messages, render) if is_same else None
    if added is not None:
        kept = history.token_ids
        return NextPrompt(token_ids=(*kept, *added), num_kept=len(kept), messages=messages)
    said = [*history.messages, *messages]
    whole = render.prompt(said)
    pairs = zip(whole, history.token_ids, strict=False)
    num_kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    _log.warning(
        "earlier turns are written differently than before, by the model's chat template or with "
        "other tools: the history is tokenized again, and %d of its %d tokens stay as they were",
        num_kept,
        len(history.token_ids),
    )
    return NextPrompt(token_ids=tuple(whole), num_kept=num_kept, messages=messages)


@final
@dataclass(frozen=True)
class _Template:
    """Renders chats without tools, with these variables."""

    tokenizer: Tokenizer
    variables: Mapping[str, Any] | None

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        return self.tokenizer.apply_chat_template(messages, variables=self.variables)

    def continuation(
        self,
        asked: Sequence[Mapping[str, Any]],
        answer: Mapping[str, Any],
        new: Sequence[Mapping[str, Any]],
    ) -> Sequence[int] | None:
        return self.tokenizer.chat_continuation(asked, answer, new, variables=self.variables)


def kept_answer(
    tokenizer: Tokenizer,
    sample: Sample,
    *,
    after: Sequence[int],
    skip_special_tokens: bool,
    thinking: Thinking | None = None,
) -> tuple[int, ...]:
    """Return the tokens of an answer that ended with "stop", without what ended it.

    A stop string or stop token is not part of the answer: the history has the tokens of the text,
    and the model's end token if that ended it. If a token reaches past the text, its part of the
    text is tokenized again. `after` has the tokens of the prompt. An answer that a stop string
    ended while it thought is kept whole.
    """
    answer, text = sample.token_ids, sample.text
    if not answer or answer[-1] in tokenizer.eos_token_ids:
        return answer
    if not text:
        return answer if sample.reasoning else ()
    reader, shown = (None, ()) if thinking is None else (thinking.reader(), thinking.shown)
    decoder = tokenizer.stream_decoder(skip_special_tokens, after=after, shown=shown)
    pushed = num_kept = num_shown = 0
    for i, token_id in enumerate(answer, 1):
        new = decoder.push([token_id])
        pushed += len(new if reader is None else reader.push(new)[1])
        if reader is not None and reader.phase != "answer":
            num_kept = i
            continue
        num_known = pushed + len(decoder.kept())
        if num_known == len(text):
            return answer[:i]
        if num_known > len(text):
            return (*answer[:num_kept], *_encoded_after(tokenizer, text[num_shown:]))
        if num_known > num_shown:
            num_kept, num_shown = i, num_known
    return answer  # which ends inside a character


def _encoded_after(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text that follows other text: some tokenizers begin with a space."""
    for before in ("\n", "a"):
        apart = tokenizer.encode(before, False, parse_special=False)
        found = tokenizer.encode(before + text, False, parse_special=False)
        if found[: len(apart)] == apart:
            return found[len(apart) :]
    return tokenizer.encode(text, False, parse_special=False)


def as_messages(said: Any) -> tuple[Message, ...]:
    """Return a copy as plain JSON; InvalidRequestError unless they are JSON objects."""
    try:
        plain = json.loads(json.dumps(list(said), allow_nan=False))
        json.dumps(plain, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"messages must be plain JSON in valid Unicode: {error}; give "
            "{'role': ..., 'content': ...} with text"
        ) from error
    if not all(isinstance(message, dict) for message in plain):
        raise InvalidRequestError(
            "a turn is a text, all chat messages ({'role': ..., 'content': ...}) or all token ids "
            f"(whole numbers); this one starts with {plain[0]!r}"
        )
    check_messages(plain)
    return tuple(plain)


def _parsed(said: Any) -> tuple[tuple[Message, ...] | None, tuple[int, ...]]:
    if isinstance(said, str):
        said = [{"role": "user", "content": said}] if said else ()
    elif isinstance(said, Mapping):
        said = [said]
    elif not hasattr(said, "__iter__"):
        raise InvalidRequestError(
            f"a turn of type {type(said).__name__} is not understood; give a text, messages or "
            "token ids"
        )
    items = list(said)
    if not items:
        raise EmptyPromptError("the turn is empty; give at least one character, message or token")
    try:
        if not any(isinstance(item, bool) for item in items):
            return None, tuple(operator.index(item) for item in items)
    except TypeError:
        pass
    return as_messages(items), ()


def _is_written_by(render: Render, history: History) -> bool:
    """Return whether `render` gives the newest prompt that was tokenized as a whole."""
    newest = num_before = 0
    for i, turn in enumerate(history.turns):
        if turn.num_kept < num_before:
            newest = i
        num_before = turn.num_kept + len(turn.prompt) + len(turn.answer)
    turn, before = history.turns[newest], History.of(history.turns[:newest])
    written = render.prompt([*before.messages, *(turn.messages or ())])
    return tuple(written) == (*before.token_ids[: turn.num_kept], *turn.prompt)


def _continuation(
    tokenizer: Tokenizer, history: History, messages: Sequence[Message], render: Render
) -> Sequence[int] | None:
    """Return the token ids between the history and the next answer, or None (see `ChatTemplate`).

    The template's end of a turn is left out or added, so that it follows the last answer once.
    """
    last = history.turns[-1]
    added = render.continuation(history.asked, last.reply, messages)
    if added is None or not last.answer or last.answer[-1] not in tokenizer.eos_token_ids:
        return added
    for i, token_id in enumerate(added):
        if token_id == last.answer[-1]:
            return added[i + 1 :]
        if tokenizer.decode([token_id], skip_special_tokens=False).strip():
            break
    return added
