"""Conversations: turns that build on each other."""

from __future__ import annotations

import builtins
import secrets
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, final

from jaxserve.conversations.journal import Journal, JournalEntry
from jaxserve.conversations.prompts import (
    NextPrompt,
    Render,
    Said,
    as_messages,
    kept_answer,
    next_prompt,
)
from jaxserve.conversations.turns import History, Message, Turn
from jaxserve.core.errors import (
    ConversationBusyError,
    ConversationConflictError,
    ConversationTooLongError,
    InvalidConfigError,
    InvalidSamplingParamsError,
    OtherModelError,
    PromptTooLongError,
    TurnCancelledError,
    TurnTimeoutError,
    UnknownConversationError,
)
from jaxserve.core.off_loop import entered, in_thread
from jaxserve.core.request import Completion, Sample
from jaxserve.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.engine.answers import Piece, PieceSink
    from jaxserve.models.tokenizer import Tokenizer

_MAX_ID_LENGTH = 256


class TurnClient(Protocol):
    """Answers the prompts of conversations."""

    @property
    def max_prompt_tokens(self) -> int:
        """Length of the longest prompt that leaves room for one output token."""
        ...

    def answer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> Completion:
        """Wait for the completion and return it; a failed request's completion has an error.

        When this raises, KeyboardInterrupt included, the request has ended.

        Raises:
          InvalidRequestError: one of its subclasses.
          TurnTimeoutError: the request has not ended after `timeout_s` seconds.
        """
        ...

    async def aanswer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
        on_piece: PieceSink | None = None,
    ) -> Completion:
        """`answer` for asyncio. Cancelling the task ends the request.

        Args:
          on_piece: called with the pieces that `stream` yields, on another thread; it must not
            block.
        """
        ...

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> Generator[Piece]:
        """Yield the completion piece by piece. Closing the generator cancels the request.

        Raises:
          InvalidRequestError: one of its subclasses.
          TimeoutError: the last piece has not arrived after `timeout_s` seconds.
        """
        ...

    def astream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> AsyncGenerator[Piece]:
        """`stream` for asyncio."""
        ...


@final
class Conversation:
    """A conversation that `Service.conversation` opened. Thread-safe; one turn runs at a time.

    A turn is kept as a whole or not at all: one that fails, or is cancelled or interrupted, leaves
    the conversation as it was. The prompt of a turn begins with exactly the tokens of the turns
    before, so that their KV can be reused.

    Attributes:
      id: names the conversation in the journal and on its requests.
      num_asked: tokens of the prompt that is being answered, the history included; 0 while none is.
    """

    def __init__(self, id: str, home: Conversations, start: Sequence[Message]):
        self.id = id
        self._home = home
        self._start = tuple(start)
        self.num_asked = 0
        self._one_turn = threading.Lock()
        self._entry = home.journal.find(id)
        self._history = History()
        self._is_deleted = False
        if self._entry is not None:
            self._load()

    def __repr__(self) -> str:
        """Return the id and the numbers of kept turns and their tokens."""
        return f"Conversation({self.id!r}, {len(self.turns)} turns, {len(self.token_ids)} tokens)"

    @property
    def history(self) -> list[Message]:
        """All messages of kept turns, and those that the conversation began with."""
        history = self._history
        if history.turns:
            return history.messages
        return [dict(message) for message in self._start]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self._history.token_ids

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self._history.turns

    def send(
        self, said: Said, params: SamplingParams | None = None, *, timeout_s: float | None = None
    ) -> Completion:
        """Return the answer to the next turn, which is then in the journal.

        Ctrl-C ends the request and is raised.

        Args:
          said: a text, which becomes the user's message; one message or a list of them; or, in a
            conversation of token ids, token ids.
          timeout_s: the most seconds to wait.

        Raises:
          InvalidRequestError: one of its subclasses, ConversationTooLongError among them.
          ConversationError: one of its subclasses.
          RuntimeClosedError, EngineFailedError
        """
        params = _checked(params)
        with self._turn(said, params) as prompt:
            completion = self._home.client.answer(
                prompt.token_ids,
                _of_tokens(prompt, params),
                conversation_id=self.id,
                timeout_s=timeout_s,
            )
            self._keep_completion(prompt, params, completion)
        return completion

    async def asend(
        self,
        said: Said,
        params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        max_prompt_tokens: int | None = None,
        render: Render | None = None,
        on_piece: PieceSink | None = None,
    ) -> Completion:
        """`send` for asyncio. Cancelling the task cancels the turn, unless it is being written
        already.

        Args:
          max_prompt_tokens: the caller's limit on the prompt, the history included.
          render: as for `next_prompt`.
          on_piece: as for `TurnClient.aanswer`.
        """
        params = _checked(params)
        async with entered(self._turn(said, params, max_prompt_tokens, render)) as prompt:
            completion = await self._home.client.aanswer(
                prompt.token_ids,
                _of_tokens(prompt, params),
                conversation_id=self.id,
                timeout_s=timeout_s,
                on_piece=on_piece,
            )
            await in_thread(self._keep_completion, prompt, params, completion)
        return completion

    def stream(
        self, said: Said, params: SamplingParams | None = None, *, timeout_s: float | None = None
    ) -> Generator[Piece]:
        """Yield the answer of `send` in pieces; the last one when the turn is in the journal.

        Closing the generator before that cancels the request, and the turn is not kept.
        """
        params = _checked(params)
        received = _Received()
        with self._turn(said, params) as prompt:
            pieces = self._home.client.stream(
                prompt.token_ids,
                _of_tokens(prompt, params),
                conversation_id=self.id,
                timeout_s=timeout_s,
            )
            with self._in_time(received, timeout_s), closing(pieces):
                for piece in pieces:
                    if received.goes_on(piece):
                        yield piece
            last = self._keep_received(prompt, params, received)
        yield last

    async def astream(
        self,
        said: Said,
        params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        max_prompt_tokens: int | None = None,
        render: Render | None = None,
    ) -> AsyncGenerator[Piece]:
        """`stream` for asyncio. Close the generator (`contextlib.aclosing`) to leave it early."""
        params = _checked(params)
        received = _Received()
        async with entered(self._turn(said, params, max_prompt_tokens, render)) as prompt:
            pieces = self._home.client.astream(
                prompt.token_ids,
                _of_tokens(prompt, params),
                conversation_id=self.id,
                timeout_s=timeout_s,
            )
            with self._in_time(received, timeout_s):
                async with aclosing(pieces):
                    async for piece in pieces:
                        if received.goes_on(piece):
                            yield piece
            last = await in_thread(self._keep_received, prompt, params, received)
        yield last

    def fork(self, num_turns: int | None = None, *, id: str | None = None) -> Conversation:
        """Return a new conversation with the same first turns, which is then in the journal.

        Args:
          num_turns: number of turns; all by default.
          id: id of the new conversation; generated by default.

        Raises:
          InvalidConfigError: there are fewer turns, or a conversation with this id exists.
          ConversationError: one of its subclasses.
        """
        turns = self._history.turns
        count = len(turns) if num_turns is None else num_turns
        if not min(1, len(turns)) <= count <= len(turns):
            raise InvalidConfigError(
                f"num_turns={num_turns} is not allowed: conversation {self.id!r} has {len(turns)} "
                f"turns; give a number from 1 to {len(turns)}"
            )
        return self._home.begin(id, self._start, History.of(turns[:count]))

    def delete(self) -> None:
        """Delete the conversation, and overwrite every copy of it in the journal's files.

        Raises:
          ConversationBusyError: a turn is being answered.
          JournalError
        """
        with self._alone():
            if self._entry is not None:
                self._home.journal.delete(self.id)
            self._history, self._entry, self._is_deleted = History(), None, True
            self._home.forget(self)

    # ---- one turn ----

    @contextmanager
    def _turn(
        self,
        said: Said,
        params: SamplingParams,
        limit: int | None = None,
        render: Render | None = None,
    ) -> Iterator[NextPrompt]:
        with self._alone(), self._home.journal.using(self.id):
            self._catch_up()
            variables = params.template_kwargs
            prompt = next_prompt(
                self._home.tokenizer, self._history, self._start, said, render, variables
            )
            most, num_history = self._home.client.max_prompt_tokens, len(self._history.token_ids)
            if num_history and len(prompt.token_ids) > most:
                num_new = len(prompt.token_ids) - num_history
                raise ConversationTooLongError(self.id, num_history, num_new, most)
            if limit is not None and len(prompt.token_ids) > limit:
                raise PromptTooLongError(
                    f"the prompt has {len(prompt.token_ids)} tokens with the history, and "
                    f"max_prompt_tokens={limit}; shorten it, or begin a new conversation"
                )
            self.num_asked = len(prompt.token_ids)
            try:
                yield prompt
            finally:
                self.num_asked = 0

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._one_turn.acquire(blocking=False):
            raise ConversationBusyError(
                f"conversation {self.id!r} is still being answered; wait for the answer, cancel "
                "it, or fork() to continue it differently meanwhile"
            )
        try:
            if self._is_deleted:
                raise self._unknown()
            yield
        finally:
            self._one_turn.release()

    @contextmanager
    def _in_time(self, received: _Received, timeout_s: float | None) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise TurnTimeoutError(self.id, timeout_s, len(received.token_ids)) from None

    def _keep_completion(
        self, prompt: NextPrompt, params: SamplingParams, completion: Completion
    ) -> None:
        if completion.error is not None:
            raise completion.error
        if completion.finish_reason == "cancelled":
            raise self._cancelled()
        self._keep(prompt, params, completion.samples[0])

    def _keep_received(
        self, prompt: NextPrompt, params: SamplingParams, received: _Received
    ) -> Piece:
        last = received.last
        if last is None or last.finish_reason is None or last.finish_reason == "cancelled":
            raise self._cancelled()
        sample = Sample(
            text="".join(received.texts),
            token_ids=tuple(received.token_ids),
            finish_reason=last.finish_reason,
            reasoning="".join(received.reasoning),
        )
        self._keep(prompt, params, sample)
        return last

    def _keep(self, prompt: NextPrompt, params: SamplingParams, sample: Sample) -> None:
        tokenizer, answer = self._home.tokenizer, sample.token_ids
        is_stopped = sample.finish_reason == "stop"
        if is_stopped and prompt.messages is not None and tokenizer is not None:
            skip = params.skip_special_tokens
            thinking = None
            if params.separate_reasoning is not False:
                thinking = tokenizer.thinking_after(prompt.token_ids)
            answer = kept_answer(
                tokenizer,
                sample,
                after=prompt.token_ids,
                skip_special_tokens=skip,
                thinking=thinking,
            )
        turn = Turn(
            num_kept=prompt.num_kept,
            prompt=prompt.token_ids[prompt.num_kept :],
            answer=answer,
            messages=prompt.messages,
            text=sample.text,
            finish_reason=sample.finish_reason,
            finished_s=time.time(),
            reasoning=sample.reasoning or "",
        )
        history = self._history.extended(turn)
        home = self._home
        try:
            self._entry = home.journal.append(
                self.id, self._entry, home.vocabulary, history, [turn]
            )
            self._history = history
        except KeyboardInterrupt:  # before or after the turn was written
            entry = home.journal.find(self.id)
            if entry is not None and entry.num_turns == len(history.turns):
                self._entry, self._history = entry, history
            raise

    def _catch_up(self) -> None:
        """Read what another process or runtime has written."""
        entry, known = self._home.journal.find(self.id), self._entry
        if (entry and (entry.key, entry.num_turns)) == (known and (known.key, known.num_turns)):
            return
        if entry is None:
            self._home.forget(self)
            raise self._unknown()
        if known is None or entry.key != known.key:
            self._home.forget(self)
            raise ConversationConflictError(
                f"another process or runtime has begun a conversation {self.id!r} meanwhile; open "
                "it again with conversation(), or choose another id"
            )
        self._entry = entry
        self._load()

    def _load(self) -> None:
        entry = self._entry
        assert entry is not None
        if entry.vocabulary != self._home.vocabulary:
            raise OtherModelError(
                f"conversation {self.id!r} is in the tokens of another model's vocabulary, or was "
                "made with another chat template; serve that model, or begin a new conversation "
                "with its messages: conversation(messages=...), from `jaxserve conversations "
                "export`"
            )
        self._history = self._home.journal.history(entry)

    def _cancelled(self) -> TurnCancelledError:
        return TurnCancelledError(
            f"the answer was cancelled; conversation {self.id!r} is as it was before this turn"
        )

    def _unknown(self) -> UnknownConversationError:
        return UnknownConversationError(
            f"conversation {self.id!r} was deleted, or dropped by the journal's limits; begin "
            "a new one"
        )


@final
@dataclass
class _Received:
    """The pieces of an answer so far. The last piece is held back."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    last: Piece | None = None

    def goes_on(self, piece: Piece) -> bool:
        """Add a piece; return whether it is not the last."""
        self.token_ids += piece.token_ids
        self.texts.append(piece.text)
        self.reasoning.append(piece.reasoning)
        if piece.finish_reason is not None:
            self.last = piece
        return self.last is None


def _of_tokens(prompt: NextPrompt, params: SamplingParams) -> SamplingParams:
    """Return the parameters with which the tokens of a rendered prompt are answered."""
    is_read = params.separate_reasoning
    if is_read is None and prompt.messages is not None:
        is_read = True
    return replace(params, separate_reasoning=is_read, template_kwargs=None)


def _checked(params: SamplingParams | None) -> SamplingParams:
    params = params or SamplingParams()
    if params.n != 1:
        raise InvalidSamplingParamsError(
            f"n={params.n} is not allowed: a turn has one answer; give n=1, and fork() the "
            "conversation for others"
        )
    return params


@final
class Conversations:
    """Opens, lists and deletes conversations (`Service.conversations`). Thread-safe.

    The `journal` stores their turns, and the `client` answers them. Without a `tokenizer`
    conversations are token ids. `vocabulary` is a fingerprint of what those mean; equal for equal
    tokenizers.
    """

    def __init__(
        self, journal: Journal, client: TurnClient, tokenizer: Tokenizer | None, vocab_size: int
    ):
        self.journal = journal
        self.client = client
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.RLock()
        # One object for each id, so that its turns exclude each other.
        self._open: weakref.WeakValueDictionary[str, Conversation] = weakref.WeakValueDictionary()

    @property
    def vocabulary(self) -> str:
        if self.tokenizer is None:
            return f"{self._vocab_size} token ids"
        return self.tokenizer.fingerprint

    def open(
        self,
        id: str | None = None,
        *,
        system: str | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> Conversation:
        instruction = [{"role": "system", "content": system}] if system else []
        start = as_messages([*instruction, *messages])
        id = _checked_id(id)
        with self._lock:
            opened = self._open.get(id)
            if opened is None:
                opened = self._open[id] = Conversation(id, self, start)
        said = opened.history[: len(start)]
        if said != list(start):
            raise InvalidConfigError(
                f"a conversation with the id {id!r} exists and began with other messages "
                f"({said!r}); leave out system and messages to continue it, or choose another id"
            )
        return opened

    def begin(self, id: str | None, start: Sequence[Message], history: History) -> Conversation:
        """Begin a conversation for `fork`; InvalidConfigError for an invalid or used id."""
        id = _checked_id(id)
        with self._lock:
            if id in self._open or self.journal.find(id) is not None:
                raise InvalidConfigError(
                    f"a conversation with the id {id!r} exists; choose another id"
                )
            if history.turns:
                self.journal.append(id, None, self.vocabulary, history, history.turns)
            begun = self._open[id] = Conversation(id, self, start)
        return begun

    def list(self) -> builtins.list[JournalEntry]:
        return self.journal.list()

    def delete(self, id: str) -> None:
        """Delete a conversation, opened or not; UnknownConversationError if none has this id."""
        with self._lock:
            opened = self._open.get(id)
        if opened is None:
            self.journal.delete(id)
        else:
            opened.delete()

    def __contains__(self, id: str) -> bool:
        return self.journal.find(id) is not None

    def forget(self, conversation: Conversation) -> None:
        """Drop a deleted conversation, so that its id can be used again."""
        with self._lock:
            if self._open.get(conversation.id) is conversation:
                del self._open[conversation.id]


def _checked_id(id: str | None) -> str:
    if id is None:
        return secrets.token_hex(8)
    if not isinstance(id, str) or not 0 < len(id) <= _MAX_ID_LENGTH or not id.isprintable():
        raise InvalidConfigError(
            f"id={id!r} is not a valid conversation id; give 1 to {_MAX_ID_LENGTH} printable "
            "characters"
        )
    return id
