"""Chat messages to token ids, by the model's template."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, final

from jaxserve.core.errors import InvalidRequestError

Message = Mapping[str, Any]

# A stand-in for a control token spelt out in chat messages is a mark and a character for the token.
# The mark is drawn from private-use characters, so that no message can be written to contain it.
_MARK_CHARACTERS, _MARK_LENGTH = "".join(map(chr, range(0xE000, 0xF900))), 4
FIRST_STAND_IN = 0xF0000
# Stands for an answer, to find what a template puts after one.
_PROBE = "answer"
# Stands for its thinking.
_THOUGHT = "\ue000thought\ue000"


@final
class ChatTemplate:
    """Renders and encodes chats. Control tokens spelt out inside a message stay ordinary text:
    a message cannot end its own turn or open another's.

    Args:
      special_tokens: names that the template may use (`bos_token`, ...) and their texts.
      encode: returns the token ids of a text that comes in parts; control tokens in every second
        part are ordinary text.
    """

    def __init__(
        self,
        source: str,  # Jinja, as in a tokenizer_config.json
        special_tokens: Mapping[str, str],
        control_texts: Sequence[str],  # the texts of all control tokens, the longest first
        encode: Callable[[Sequence[str]], list[int]],
    ):
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._control_texts = control_texts
        self._encode = encode

    def apply(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a chat.

        `tools` are functions that the model may call, in OpenAI's form; the template gets an empty
        list as a list, as in transformers. `variables` are further variables of the template.

        Raises:
          InvalidRequestError: the template refuses these messages, or they are not valid Unicode.
        """
        given = None if tools is None else list(tools)
        (said, given, variables), marker = self._shielded([list(messages), given, variables or {}])
        return self._ids(self._rendered(said, add_generation_prompt, given, variables), marker)

    def continuation(
        self,
        asked: Sequence[Message],
        answer: Message,
        new: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int] | None:
        """Return the token ids after the answer's own tokens when a chat continues with `new`.

        They begin with the template's end of the answer's turn and end where the next begins. None
        if the template is not stable: if it renders the earlier messages differently than before
        the answer, leaves out its thinking, or changes the answer by more than the white space
        around it. `asked` has the messages before the answer.

        Raises:
          InvalidRequestError: as `apply`, for all messages together.
        """
        given = None if tools is None else list(tools)
        shielded, marker = self._shielded([list(asked), answer, list(new), given, variables or {}])
        asked, answer, new, given, variables = shielded
        thoughts = str(answer.get("reasoning_content") or "").strip()
        probed = {**answer, "content": _PROBE}
        if thoughts:
            probed["reasoning_content"] = _THOUGHT
        head = self._rendered(asked, True, given, variables)
        whole = self._rendered([*asked, probed, *new], True, given, variables)
        if not whole.startswith(head):
            return None
        gap, probe, rest = whole[len(head) :].partition(_PROBE)
        if not probe or (_THOUGHT not in gap if thoughts else gap.strip()):
            return None
        real = self._rendered([*asked, answer, *new], True, given, variables)
        if not (real.startswith(head) and real.endswith(rest)):
            return None
        written = real[len(head) : len(real) - len(rest)].strip()
        if thoughts:  # its marks are the model's own
            gap = gap.replace(_THOUGHT, thoughts)
            if not written.startswith(gap.strip()):
                return None
            written = written[len(gap.strip()) :].strip()
        if written != str(answer["content"]).strip():
            return None
        # Encoded after a text: at the beginning of a text some tokenizers put a space.
        context, ids = self._ids(_PROBE, None), self._ids(_PROBE + rest, marker)
        is_apart = ids[: len(context)] == context
        return ids[len(context) :] if is_apart else self._ids(rest, marker)

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of the variables that it reads."""
        from jaxserve.models.jinja import variables_of

        return variables_of(self._source)

    @cached_property
    def takes_text_arguments(self) -> bool:
        """Return whether it writes the arguments of an earlier call as the text that a client sent.

        Other templates write the JSON of an object. Found by rendering a call.
        """
        arguments = '{"a":  "b"}'  # not as a filter writes it
        return arguments in (self._with_call(arguments) or "")

    @cached_property
    def writes_calls(self) -> bool:
        """Return whether it writes the calls of an earlier answer, found by rendering one.

        A template that refuses the call writes calls. DeepSeek R1's writes those of a message
        without content only, and SmolLM3's none.
        """
        found = [self._with_call(each) for each in ('{"a": "_value"}', {"a": "_value"})]
        marks = "abcdefghi", "_name", "_value"
        return not any(found) or any(mark in text for text in found if text for mark in marks)

    @cached_property
    def takes_system(self) -> bool:
        """Return whether it takes a system's message, which Gemma 2's does not."""
        chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
        try:
            self._rendered(chat, True, None, {})
        except InvalidRequestError:
            return False
        return True

    def _with_call(self, arguments: Any) -> str | None:
        """Return a chat that ends with a call; None if the template refuses it."""
        function = {"name": "_name", "arguments": arguments}
        call = {"id": "abcdefghi", "type": "function", "function": function}
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        chat = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            return self._rendered(chat, False, [tool], {})
        except InvalidRequestError:
            return None

    def _ids(self, rendered: str, marker: str | None) -> list[int]:
        parts = [rendered] if marker is None else re.split(marker, rendered)
        parts[1::2] = [self._control_texts[ord(part) - FIRST_STAND_IN] for part in parts[1::2]]
        try:
            return self._encode(parts)
        except (TypeError, UnicodeError) as error:
            raise InvalidRequestError(
                f"the messages cannot be encoded: {error}; give text that is valid Unicode, "
                "without lone surrogates"
            ) from error

    def _rendered(
        self, messages: Any, add_generation_prompt: bool, tools: Any, variables: Any
    ) -> str:
        # Jinja is only needed for chats.
        from jaxserve.models.jinja import render

        try:
            return render(
                self._source,
                messages,
                self._special_tokens,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                variables=variables,
            )
        except Exception as error:  # Jinja's own kinds, and KeyError and the like from templates
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}; give a list of "
                "{'role': ..., 'content': ...}"
            ) from error

    def _shielded(self, messages: Any) -> tuple[Any, str | None]:
        """Return `messages` with a stand-in for every control token, and the pattern of stand-ins.

        Keys are shielded too, since templates write those of a tool's parameters. The pattern is
        None if no token was replaced. Raises InvalidRequestError if messages are nested too deeply.
        """
        try:
            return self._with_stand_ins(messages)
        except RecursionError:
            raise InvalidRequestError(
                "the messages or tools are nested too deeply; give objects and lists within each "
                "other at fewer levels"
            ) from None

    def _with_stand_ins(self, messages: Any) -> tuple[Any, str | None]:
        if not self._control_texts:
            return messages, None
        everything = "\n".join(_strings(messages))
        control = re.compile("|".join(map(re.escape, self._control_texts)))
        if not control.search(everything):
            return messages, None
        mark = drawn_mark()
        while mark in everything:
            mark = drawn_mark()
        stand_in = {t: mark + chr(FIRST_STAND_IN + i) for i, t in enumerate(self._control_texts)}

        def shield(value: Any) -> Any:
            if isinstance(value, str):
                return control.sub(lambda found: stand_in[found[0]], value)
            if isinstance(value, Mapping):
                return {shield(key): shield(item) for key, item in value.items()}
            if isinstance(value, Sequence):
                return [shield(item) for item in value]
            return value

        last = chr(FIRST_STAND_IN + len(self._control_texts) - 1)
        return shield(messages), f"{mark}([{chr(FIRST_STAND_IN)}-{last}])"


def drawn_mark() -> str:
    """Return private-use characters that are in no text, except by a tiny chance."""
    return "".join(secrets.choice(_MARK_CHARACTERS) for _ in range(_MARK_LENGTH))


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)
