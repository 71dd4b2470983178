"""Calls of tools in a model's text: formats of the families, their grammars and their reader.

=======  =============================================================================  ============
format   a call is written as                                                           families
=======  =============================================================================  ============
HERMES   <tool_call>, JSON of name and arguments, </tool_call>; once a call             Qwen, Hermes
LIST     <tool_call>, a JSON list of names and arguments, </tool_call>                  SmolLM2
MISTRAL  [TOOL_CALLS], a JSON list of names and arguments                               Mistral
LLAMA3   JSON of name and parameters, which is the whole answer; several by semicolons  Llama 3
=======  =============================================================================  ============
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from jaxserve.core.errors import InvalidGrammarError
from jaxserve.core.json_schema import lark_rules

_INSTRUCTION = (
    "You can call functions. They are within <tools></tools>:\n<tools>{tools}</tools>\n\n"
    "To call some, answer with a JSON array of their names and arguments within <tool_call> tags, "
    "and with nothing else:\n"
    '<tool_call>[{{"name": "name1", "arguments": {{"argument1": "value1"}}}}]</tool_call>'
)


@final
@dataclass(frozen=True)
class ToolFormat:
    """The notation in which a family writes calls."""

    # begin, end: around the JSON; empty for none. A begin that the tokenizer has as one token is
    # that token.
    begin: str
    end: str
    is_list: bool  # whether the JSON is a list of calls; otherwise it is one call
    separator: str | None  # between two calls, or two lists of them; None if there is at most one
    arguments: str = "arguments"  # the key of the arguments
    # Whether the chat template writes the tools; otherwise `with_instruction` does.
    in_template: bool = True


HERMES = ToolFormat("<tool_call>\n", "\n</tool_call>", is_list=False, separator="\n")
LIST = ToolFormat("<tool_call>", "</tool_call>", is_list=True, separator=None, in_template=False)
MISTRAL = ToolFormat("[TOOL_CALLS]", "", is_list=True, separator=None)
LLAMA3 = ToolFormat("", "", is_list=False, separator="; ", arguments="parameters")


def format_of(chat_template: str | None) -> ToolFormat:
    """Return the format of a model, found by searching its chat template."""
    template = chat_template or ""
    if "tools" not in template:
        return LIST
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" not in template and '"parameters"' in template:
        return LLAMA3
    return HERMES


def with_instruction(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return messages with instructions in the first, the system's, on how to call tools.

    For chat templates without tools; calls and results of earlier turns become text. Without tools
    nothing else changes.
    """
    said = [_as_text(message) for message in messages]
    if not tools:
        return said
    instruction = _INSTRUCTION.format(tools=json.dumps([tool["function"] for tool in tools]))
    if said and said[0].get("role") == "system":
        first = f"{said[0]['content']}\n\n{instruction}"
        return [{**said[0], "content": first}, *said[1:]]
    return [{"role": "system", "content": instruction}, *said]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>{message['content']}</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    written = json.dumps([call["function"] for call in calls])
    content = f"{message.get('content') or ''}<tool_call>{written}</tool_call>"
    return {"role": message["role"], "content": content}


def grammar_of(
    form: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    token_of: Callable[[str], int | None],  # returns the token of a text that is one added token
    *,
    may_be_several: bool,
) -> str:
    """Return a Lark grammar of answers that call one of the tools, or several.

    Args:
      tools: with `name` and perhaps `parameters`, a JSON schema of an object.

    Raises:
      InvalidGrammarError: llguidance cannot enforce the parameters of a tool.
    """
    lines = [f"call: {_literal(form.begin, token_of)} body {_literal(form.end, token_of)}"]
    if form.is_list:
        more = ' (", " one)*' if may_be_several else ""
        lines.append(f'body: "[" one{more} "]"')
    else:
        lines.append("body: one")
    lines.append("one: " + " | ".join(f"tool{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        begin = f'{{"name": {json.dumps(tool["name"])}, {json.dumps(form.arguments)}: '
        lines.append(f'tool{i}: {json.dumps(begin)} arguments{i} "}}"')
        # A separate JSON schema, so that references in it begin at its own root.
        try:
            lines += lark_rules(parameters_of(tool), f"arguments{i}")
        except (ValueError, RecursionError) as error:
            raise InvalidGrammarError(
                f"the parameters of the tool {tool['name']!r} cannot be compiled: {error}"
            ) from error
    many = form.separator is not None and may_be_several
    start = f"call ({json.dumps(form.separator)} call)*" if many else "call"
    return "\n".join(["%llguidance {}", f"start: {start}", *lines, ""])


def parameters_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the JSON schema of a tool's arguments; any object without one."""
    return tool.get("parameters") or {"type": "object"}


def _literal(text: str, token_of: Callable[[str], int | None]) -> str:
    """Return a text in Lark, with a part that is an added token as that token."""
    tag = text.strip()
    token = token_of(tag) if tag else None
    if token is None:
        return json.dumps(text) if text else ""
    before, _, after = text.partition(tag)
    parts = [
        json.dumps(before) if before else "",
        f"<[{token}]>",
        json.dumps(after) if after else "",
    ]
    return " ".join(filter(None, parts))


# The beginning of a call, up to the object of its arguments; in a list, with the text before it.
_HEAD = re.compile(
    r'\s*(?:(\[)\s*)?\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


@final
@dataclass(frozen=True)
class Call:
    """A call; `arguments` is JSON."""

    name: str
    arguments: str


@final
@dataclass(frozen=True)
class MoreArguments:
    """More of the arguments of the last call, as the model writes them."""

    text: str


Part = str | Call | MoreArguments


@final
class CallReader:
    """Separates the calls from the text of an answer that comes in pieces.

    Text that may be the beginning of a call is held back, and returned as text if it is not one.
    White space before a call is dropped, however the text is cut, and so is white space between two
    calls and after the last one. A piece costs time in proportion to its own length, not to that of
    the text that is held back.

    Args:
      streamed: names of functions whose calls are returned when their arguments begin, without
        these; `MoreArguments` follow as they come. Such a call stays one if its arguments end too
        early. Other calls are returned when they are complete. Names have no braces.
    """

    def __init__(self, form: ToolFormat, streamed: Collection[str] = ()):
        self._form = form
        self._streamed = streamed
        self._begin, self._end = form.begin.strip(), form.end.strip()
        self._held: list[str] = []  # start of the buffer that need not be scanned again
        self._buffer = ""
        self._gap = ""  # the white space before a call that may turn out to be text
        self._is_gap = True  # whether only white space came since the beginning or the last call
        self._is_inside = False
        self._is_text = False  # from here on, for a format whose calls are the whole answer
        self._has_call = False
        self._num_opened = 0  # braces in the held part of a call
        self._is_whole = False  # the call is returned when it is complete
        self._value = _ObjectEnd(self._end)  # of the JSON in the buffer
        self._arguments: _ObjectEnd | None = None  # of the call that is being returned
        self._is_after = False  # the arguments of a call that was returned as it came
        self._is_open = False  # the object of that call
        self._other_keys: _ObjectEnd | None = None  # after its arguments
        self._is_in_list = False  # of such calls
        self._seeks_end = False  # text before the end tag is ignored from now on

    def push(self, text: str) -> list[Part]:
        """Return text and calls that are complete, in order."""
        self._buffer += text
        found: list[Part] = []
        while (new := self._next()) is not None:
            found += new
        return found

    def finish(self) -> list[Part]:
        """Return the rest when the answer has ended."""
        rest = self._taken(len(self._buffer))
        if self._arguments is not None:
            return [MoreArguments(rest)] if rest else []
        if self._is_after:
            return []
        if self._is_inside:
            calls = _calls("[" + rest if self._is_in_list else rest, self._form)
            if calls is not None:  # without their end tag
                return calls
            rest = self._gap + self._begin + rest
        is_gap = self._has_call and self._is_gap and not rest.strip(" \n;")
        self._is_inside = False
        return [rest] if rest and not is_gap else []

    def _hold(self, length: int) -> None:
        """Move the beginning of the buffer to the part that need not be scanned again."""
        if length:
            self._held.append(self._buffer[:length])
            self._buffer = self._buffer[length:]

    def _taken(self, length: int) -> str:
        self._hold(length)
        taken, self._held = "".join(self._held), []
        return taken

    def _next(self) -> list[Part] | None:
        if self._is_text:
            text = self._taken(len(self._buffer))
            return [text] if text else None
        if self._is_inside:
            return self._inside()
        return self._outside() if self._begin else self._at_start()

    def _at_start(self) -> list[Part] | None:
        """Continue where a call would begin without a tag."""
        rest = self._buffer.lstrip(" \n;" if self._has_call else " \n")
        self._hold(len(self._buffer) - len(rest))
        if not rest or "<|python_tag|>".startswith(rest):
            return None
        rest = rest.removeprefix("<|python_tag|>")
        if not rest:
            return None
        self._is_text = not rest.startswith("{")
        if not self._is_text:
            self._enter(self._taken(len(self._buffer) - len(rest)))
        return []

    def _outside(self) -> list[Part] | None:
        """Return text before a tag, without white space at its end, which a call may follow."""
        at = self._buffer.find(self._begin)
        held = 0 if at >= 0 else _num_held_back(self._buffer, self._begin)
        end = at if at >= 0 else len(self._buffer) - held
        text = self._buffer[:end].rstrip()
        found: list[Part] = [self._taken(len(text))] if text else []
        self._is_gap &= not text
        if at < 0:
            self._hold(end - len(text))
            return found or None
        self._enter(self._taken(end - len(text)))
        self._buffer = self._buffer[len(self._begin) :]
        return found

    def _enter(self, gap: str) -> None:
        self._gap, self._is_inside = gap, True
        self._expect_call()

    def _expect_call(self) -> None:
        self._num_opened, self._is_whole = 0, not self._streamed
        self._value = self._new_value()

    def _new_value(self) -> _ObjectEnd:
        """Return a finder of the end of a JSON value: a call, or the rest of a tagged list."""
        return _ObjectEnd(self._end, depth=int(bool(self._end) and self._is_in_list))

    def _inside(self) -> list[Part] | None:
        if self._arguments is not None:
            return self._in_arguments(self._arguments)
        if self._is_after:
            return self._after_arguments()
        if not self._is_whole and (begun := self._begun()):
            return begun
        return self._tagged() if self._end else self._untagged()

    def _tagged(self) -> list[Part] | None:
        """Return the calls before the end tag, once it has come outside of their strings."""
        if not self._value.has_ended:
            self._hold_call(len(self._value.take(self._buffer)))
            if not self._value.has_ended:
                return None
        at = self._buffer.find(self._end)
        if at < 0:
            self._hold(max(0, len(self._buffer) - len(self._end) + 1))
            return None
        body = self._taken(at)
        self._buffer = self._buffer[len(self._end) :]
        calls = _calls("[" + body if self._is_in_list else body, self._form)
        self._is_inside = self._is_in_list = False
        self._called(calls)
        return calls if calls is not None else [self._gap + self._begin + body + self._end]

    def _untagged(self) -> list[Part] | None:
        """Return the calls of a JSON value, once it has ended."""
        self._hold_call(len(self._value.take(self._buffer)))
        if not self._value.has_ended:
            return None
        body = self._taken(0)
        calls = _calls(body, self._form)
        self._called(calls)
        if calls is None:
            self._is_inside, self._is_text = False, True
            return [self._gap + self._begin + body]
        if self._is_in_list:  # a call in the list that was not streamed
            self._is_after = True
        else:
            self._is_inside = False
        return calls

    def _hold_call(self, length: int) -> None:
        self._num_opened += self._buffer.count("{", 0, length)
        self._hold(length)

    def _called(self, calls: list[Part] | None) -> None:
        self._has_call |= calls is not None
        self._is_gap = calls is not None

    # ---- calls that are returned as they come ----

    def _begun(self) -> list[Part] | None:
        """Return the call that is held, if its arguments have begun.

        Its second brace tells: they begin there, or it is returned when it is complete.
        """
        if self._num_opened + self._buffer.count("{") < 2:
            return None
        text = self._taken(len(self._buffer))
        self._buffer, self._num_opened, self._is_whole = text, 0, True
        self._value = self._new_value()
        head = _HEAD.match(text)
        if head is None or (head[1] and self._is_in_list):
            return None
        try:
            name = json.loads(head[2])
        except ValueError:
            return None
        if name not in self._streamed:
            return None
        self._buffer = text[head.end() :]
        self._arguments, self._has_call = _ObjectEnd(self._end), True
        self._is_in_list |= bool(head[1])
        return [Call(name, "")]

    def _in_arguments(self, arguments: _ObjectEnd) -> list[Part] | None:
        taken = self._taken(len(arguments.take(self._buffer)))
        if arguments.has_ended:
            self._arguments, self._is_after, self._is_open = None, True, True
        return [MoreArguments(taken)] if taken else [] if self._is_after else None

    def _after_arguments(self) -> list[Part] | None:
        """Continue after the arguments of a call, with the next call of a list or after the tag."""
        if self._other_keys is not None:
            self._taken(len(self._other_keys.take(self._buffer)))
            if not self._other_keys.has_ended:
                return None
            self._other_keys = None
        if not self._seeks_end and (self._is_open or self._is_in_list):
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return None
        if self._is_open:
            self._is_open = False
            if self._buffer.startswith(","):
                self._other_keys = _ObjectEnd(self._end, depth=1)
            self._buffer = self._buffer.removeprefix("}")
            return []
        if self._is_in_list and not self._seeks_end and self._buffer.startswith(","):
            self._buffer = self._buffer[1:]
            self._is_after = False
            self._expect_call()
            return []
        if self._end:
            self._seeks_end = True
            at = self._buffer.find(self._end)
            if at < 0:
                self._buffer = self._buffer[-len(self._end) + 1 :]
                return None
            self._buffer = self._buffer[at + len(self._end) :]
        elif self._is_in_list:
            self._buffer = self._buffer.removeprefix("]")
        self._is_after = self._is_in_list = self._is_inside = self._seeks_end = False
        self._is_gap = True
        return []


@final
class _ObjectEnd:
    """Finds where a JSON object ends in a text that comes in pieces.

    Args:
      end: tag that ends the object, too, outside its strings; empty for none.
      depth: number of brackets that are open before the text.
    """

    def __init__(self, end: str, depth: int = 0):
        self.has_ended = False
        self._end = end
        self._depth = depth
        self._is_string = self._is_escaped = False

    def take(self, text: str) -> str:
        """Return the beginning of a text that belongs to the object.

        A possible beginning of the end tag is excluded.
        """
        end = self._end
        for i, character in enumerate(text):
            if self._is_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._is_string = False
            elif character == '"':
                self._is_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.has_ended = True
                    return text[: i + 1]
            elif end and text.startswith(end, i):
                self.has_ended = True
                return text[:i]
            elif len(text) - i < len(end) and end.startswith(text[i:]):
                return text[:i]
        return text


def _calls(body: str, form: ToolFormat) -> list[Part] | None:
    """Return the calls in a JSON text; None if it is not of calls, or nested too deeply."""
    try:
        return _parsed_calls(json.loads(body), form)
    except (ValueError, RecursionError):
        return None


def _parsed_calls(parsed: Any, form: ToolFormat) -> list[Part] | None:
    found: list[Part] = []
    for each in parsed if isinstance(parsed, list) else [parsed]:
        if not isinstance(each, dict) or not isinstance(each.get("name"), str):
            return None
        arguments = each.get(form.arguments, each.get("arguments", each.get("parameters", {})))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        found.append(Call(each["name"], arguments))
    return found or None


def _num_held_back(text: str, tag: str) -> int:
    """Return the length of the longest end of a text that begins a tag."""
    return next(
        (n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0
    )
