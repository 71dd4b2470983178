"""Reads the calls of tools in an answer that comes in pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, final

from jaxserve.models.tool_calls import ToolFormat

# The beginning of a call, up to the object of its arguments; in a list, with what is before it.
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
    White space alone before a call is dropped, however the text is cut.

    Args:
      streamed: names of functions whose calls are returned when their arguments begin, without
        these; `MoreArguments` follow as they come. Such a call stays one if its arguments end too
        early. Other calls are returned when they are complete.
    """

    def __init__(self, form: ToolFormat, streamed: Collection[str] = ()):
        self._form = form
        self._streamed = streamed
        self._begin, self._end = form.begin.strip(), form.end.strip()
        self._buffer = ""
        self._num_searched = 0  # characters of the buffer that need not be looked at again
        self._is_gap = True  # whether only white space came since the beginning or the last call
        self._is_inside = False
        self._is_text = False  # from here on, for a format whose calls are the whole answer
        self._has_call = False
        self._value = _ObjectEnd("")  # of the JSON in the buffer, without an end tag
        self._arguments: _ObjectEnd | None = None  # of the call that is being returned
        self._is_after = False  # the arguments of a call that was returned as it came
        self._is_open = False  # the object of that call
        self._other_keys: _ObjectEnd | None = None  # behind its arguments
        self._is_in_list = False  # of such calls

    def push(self, text: str) -> list[Part]:
        """Return text and calls that are complete, in their order."""
        self._buffer += text
        found: list[Part] = []
        while (new := self._next()) is not None:
            found += new
        return found

    def finish(self) -> list[Part]:
        """Return what is left when the answer has ended."""
        rest = self._cut(len(self._buffer))
        if self._arguments is not None:
            return [MoreArguments(rest)] if rest else []
        if self._is_after:
            return []
        if self._is_inside and self._begin:
            rest = self._begin + rest
        self._is_inside = False
        is_gap = self._has_call and not rest.strip(" \n;")
        return [rest] if rest and not is_gap else []

    def _cut(self, length: int) -> str:
        """Remove the beginning of the buffer, and return it."""
        cut, self._buffer = self._buffer[:length], self._buffer[length:]
        self._num_searched = 0
        return cut

    def _next(self) -> list[Part] | None:
        """Return the next part; None if more text is needed."""
        if self._is_text:
            text = self._cut(len(self._buffer))
            return [text] if text else None
        if self._is_inside:
            return self._inside()
        return self._outside() if self._begin else self._at_start()

    def _at_start(self) -> list[Part] | None:
        """Go on where a call would begin without a tag."""
        rest = self._buffer.lstrip(" \n;" if self._has_call else " \n")
        rest = rest.removeprefix("<|python_tag|>")
        if not rest or "<|python_tag|>".startswith(rest):
            return None
        self._is_inside = rest.startswith("{")
        self._is_text = not self._is_inside
        if self._is_inside:
            self._cut(len(self._buffer) - len(rest))
        return []

    def _outside(self) -> list[Part] | None:
        """Return text before a tag; white space only if text is before or behind it."""
        at = self._buffer.find(self._begin, self._num_searched)
        held = 0 if at >= 0 else _num_held_back(self._buffer, self._begin)
        end = at if at >= 0 else len(self._buffer) - held
        is_gap = self._is_gap and not self._buffer[self._num_searched : end].strip()
        if at < 0 and (is_gap or not end):
            self._num_searched = end
            return None
        text = self._cut(end)
        self._is_gap = is_gap
        if at >= 0:
            self._cut(len(self._begin))
            self._is_inside = True
        return [text] if text and not is_gap else []

    def _inside(self) -> list[Part] | None:
        if self._arguments is not None:
            return self._in_arguments(self._arguments)
        if self._is_after:
            return self._after_arguments()
        # The object of a call's arguments begins where its head ends.
        may_begin = self._streamed and self._buffer.find("{", self._num_searched) >= 0
        if may_begin and (begun := self._begun()):
            return begun
        return self._tagged() if self._end else self._untagged()

    def _tagged(self) -> list[Part] | None:
        """Return the calls before the end tag, once it has come."""
        at = self._find_end()
        if at < 0:
            return None
        body = self._cut(at)
        self._cut(len(self._end))
        calls = _calls("[" + body if self._is_in_list else body, self._form)
        self._is_inside = self._is_in_list = False
        self._called(calls)
        return calls if calls is not None else [self._begin + body + self._end]

    def _untagged(self) -> list[Part] | None:
        """Return the calls of a JSON value, once it has ended."""
        if not self._num_searched:
            self._value = _ObjectEnd("")
        self._num_searched += len(self._value.take(self._buffer[self._num_searched :]))
        if not self._value.has_ended:
            return None
        body = self._cut(self._num_searched)
        calls = _calls(body, self._form)
        self._called(calls)
        if calls is None:
            self._is_inside, self._is_text = False, True
            return [self._begin + body]
        if self._is_in_list:  # one that was not streamed, among others
            self._is_after = True
        else:
            self._is_inside = False
        return calls

    def _called(self, calls: list[Part] | None) -> None:
        self._has_call |= calls is not None
        self._is_gap = calls is not None

    def _find_end(self) -> int:
        """Return where the end tag begins in the buffer; -1 if it has not come."""
        at = self._buffer.find(self._end, self._num_searched)
        if at < 0:
            self._num_searched = max(0, len(self._buffer) - len(self._end) + 1)
        return at

    # ---- calls that are returned as they come ----

    def _begun(self) -> list[Part] | None:
        """Return the call that the buffer begins with, if its arguments have begun."""
        head = _HEAD.match(self._buffer)
        if head is None or (head[1] and self._is_in_list):
            return None
        try:
            name = json.loads(head[2])
        except ValueError:
            return None
        if name not in self._streamed:
            return None
        self._cut(head.end())
        self._arguments, self._has_call = _ObjectEnd(self._end), True
        self._is_in_list |= bool(head[1])
        return [Call(name, "")]

    def _in_arguments(self, arguments: _ObjectEnd) -> list[Part] | None:
        taken = self._cut(len(arguments.take(self._buffer)))
        if arguments.has_ended:
            self._arguments, self._is_after, self._is_open = None, True, True
        return [MoreArguments(taken)] if taken else [] if self._is_after else None

    def _after_arguments(self) -> list[Part] | None:
        """Go on behind the arguments of a call, with the next call of a list or behind the tag."""
        if self._other_keys is not None:
            self._cut(len(self._other_keys.take(self._buffer)))
            if not self._other_keys.has_ended:
                return None
            self._other_keys = None
        rest = self._buffer.lstrip()
        if self._is_open:
            if not rest:
                return None
            self._is_open = False
            if rest.startswith(","):
                self._other_keys = _ObjectEnd(self._end, depth=1)
            self._cut(len(self._buffer) - len(rest.removeprefix("}")))
            return []
        if self._is_in_list and rest.startswith(","):
            self._cut(len(self._buffer) - len(rest) + 1)
            self._is_after = False
            return []
        if self._end:
            at = self._find_end()
            if at < 0:
                return None
            self._cut(at + len(self._end))
        elif self._is_in_list:
            if not rest:
                return None
            self._cut(len(self._buffer) - len(rest.removeprefix("]")))
        self._is_after = self._is_in_list = self._is_inside = False
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

        What may be the beginning of the end tag does not.
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
