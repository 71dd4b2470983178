"""The reader of calls in a model's text, for every format of `tool_calls`."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from jaxserve.models import tool_values
from jaxserve.models.thinking import num_begun
from jaxserve.models.tool_calls import (
    JsonArguments,
    JsonCall,
    NamedCall,
    PythonArguments,
    TaggedArguments,
    ToolFormat,
)

# Text that arrives in pieces: a reading yields where it needs the next one.
Reading = Generator[None, None, Any]
Emit = Callable[[str], None]

_SPACE = re.compile(r"\s*")
_GAP = re.compile(r"[\s;]*")
_NAME = re.compile(r"""[^\s<>{}()\[\]"'=,;|]*""")
_PYTHON_NAME = re.compile(r"[\w.-]*")
_LITERAL = re.compile(r"[\w.+-]*")
_BARE_KEY = re.compile(r"[^:{}\[\],]*")
_BARE_VALUE = re.compile(r"[^{}\[\],<]*")
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_IN_QUOTES = re.compile(r"[^'\\]*(?:\\.[^'\\]*)*", re.DOTALL)
_COMMAS = re.compile(r"[\s,:]*")
_PYTHON_CODE = re.compile(r"""[^"'()\[\]{},]*""")
# The beginning of an answer that is a call, in a format without tags.
_UNTAGGED = re.compile(r'(?:<\|\w+\|>)?\s*(?:\[?\s*\{\s*"name"\s*:|\[\s*[\w.-]+\()')
# More characters than a header, or white space behind a tag, has.
_MAX_HEADER, _MAX_SPACE = 256, 64
# Characters that a long text is read by: what is read of a buffer is copied.
_MAX_PIECE = 512
_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


@final
@dataclass(frozen=True)
class Call:
    """A call; `arguments` is JSON. `id` is the one that the model wrote, if it writes ids."""

    name: str
    arguments: str
    id: str | None = None


@final
@dataclass(frozen=True)
class MoreArguments:
    """More of the arguments of the last call."""

    text: str


Part = str | Call | MoreArguments


class _EndError(Exception):
    """The text has ended within a call."""


class _NotACallError(Exception):
    """The text does not go on as a call does."""


@final
class CallReader:
    """Separates the calls from the text of an answer that comes in pieces.

    The parts are the same however the text is cut: a whole answer is one piece. Text that may be
    the beginning of a call is held back, and returned as text if it is not one. White space before
    a call is dropped, and so is white space between two calls and after the last one. A piece costs
    time in proportion to its own length, not to that of the text that is held back.

    Args:
      tools: the parameters of each function, a JSON schema. A call of one of them is returned when
        its arguments begin, without these; `MoreArguments` follow as they come. Calls of other
        functions are returned when they are complete.

    Attributes:
      is_cut: whether the text ended within the arguments of the last call.
    """

    def __init__(self, form: ToolFormat, tools: Mapping[str, Mapping[str, Any]] | None = None):
        self._form = form
        self._tools = tools or {}
        self._begins = form.begins
        self._end = form.end.strip()
        self._buffer = ""
        self._has_ended = False
        self._drops_rest = False
        self._found: list[Part] = []
        self._gap: list[str] = []  # white space that a call may follow
        self._has_call = False  # and no text since
        self._held: list[str] | None = None  # what was read of a possible call
        self._call = Call("", "")  # the one that is being read
        self._is_in_call = False  # it was returned, and its arguments follow
        self._arguments: list[str] = []  # those that were not returned
        self.is_cut = False
        self._reading = self._read()
        next(self._reading)

    def push(self, text: str) -> list[Part]:
        """Return what a piece of text adds, in order."""
        for at in range(0, len(text), _MAX_PIECE):
            self._buffer += text[at : at + _MAX_PIECE]
            next(self._reading, None)
        return self._taken()

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return the rest when the answer has ended.

        `is_cut` says that the model would have gone on: the beginning of a call is dropped then.
        Otherwise it is text.
        """
        self._has_ended, self._drops_rest = True, is_cut
        next(self._reading, None)
        return self._taken()

    def _taken(self) -> list[Part]:
        if self._is_in_call:
            self._return_arguments()
        found, self._found = self._found, []
        return found

    # ---- the text around calls ----

    def _read(self) -> Reading:
        yield
        reads_text = self._text if self._form.begin else self._start
        try:
            while True:
                yield from reads_text()
                yield from self._calls()
        except _EndError:
            self._finish()

    def _finish(self) -> None:
        self.is_cut = self._is_in_call
        if self._held is not None:
            rest, self._held = "".join(self._held) + self._buffer, None
            if not rest and self._has_call:
                return
            if self._drops_rest and (self._form.begin or _UNTAGGED.match(rest)):
                return
            self._say("".join(self._gap) + rest)
        elif not self._has_call:
            self._say("".join(self._gap))

    def _say(self, text: str) -> None:
        if text:
            self._found.append(text)

    def _text(self) -> Reading:
        """Return text until calls begin, and hold the white space before them."""
        first = re.compile("[" + re.escape("".join(each[0] for each in self._begins)) + "]")
        while True:
            buffer = self._buffer
            if not self._has_ended and not first.search(buffer):
                self._say_or_hold(buffer)
                self._buffer = ""
                yield
                continue
            found = [(at, b) for b in self._begins if (at := buffer.find(b)) >= 0]
            at, begin = min(found, default=(len(buffer) - num_begun(buffer, self._begins), ""))
            self._say_or_hold(buffer[:at])
            self._buffer = buffer[at:]
            if begin:
                if not self._has_ended and any(
                    len(self._buffer) < len(b) and b.startswith(self._buffer) for b in self._begins
                ):
                    yield from self._more()
                    continue
                # The longest of those that begin here.
                begin = max((b for a, b in found if a == at), key=len)
                self._held = []
                if not isinstance(self._form.call, NamedCall) or begin != self._form.call.begin:
                    self._take(len(begin))
                return
            if self._has_ended:
                self._say_or_hold(self._buffer)
                self._buffer = ""
            yield from self._more()

    def _say_or_hold(self, text: str) -> None:
        said = text.rstrip()
        if said:
            self._say("".join(self._gap) + said)
            self._gap, self._has_call = [], False
        if len(said) < len(text):
            self._gap.append(text[len(said) :])

    def _start(self) -> Reading:
        """Hold the white space where calls without a tag may begin; other text is the rest."""
        space = _GAP if self._has_call else _SPACE
        self._gap.append((yield from self._run(space)))
        self._held = []
        begin = yield from self._which(self._begins)
        self._take(len(begin or ""))
        yield from self._skip()
        if not self._buffer:
            yield from self._more()
        if self._buffer[:1] not in ("{", "["):
            yield from self._rest()

    def _rest(self) -> Reading:
        """Return everything that follows as text."""
        while True:
            held, self._held = "".join(self._held or ()), None
            self._say_or_hold(held + self._buffer)
            self._buffer = ""
            yield from self._more()

    def _calls(self) -> Reading:
        """Read the calls between one begin and its end."""
        form = self._form
        try:
            if isinstance(form.call, JsonCall):
                yield from self._json_calls(form.call)
            elif form.opening:
                yield from self._expect(form.opening)
                yield from self._named_call(form.call)
                while (yield from self._is_next(",")):
                    yield from self._named_call(form.call)
                yield from self._expect(form.closing)
            else:
                yield from self._named_call(form.call)
                begin = form.call.begin.strip()
                while form.between is not None and (yield from self._seek(begin, self._end)):
                    yield from self._named_call(form.call)
        except _NotACallError:
            if self._held is not None:
                yield from self._refuse()
                return
            if self._is_in_call:
                self._return_arguments()
                self._is_in_call = False
        self._has_call = True
        if self._end:
            yield from self._skip()
            if (yield from self._which((self._end, *self._begins))) not in self._begins:
                yield from self._until(self._end, _drop)
                self._take(len(self._end))

    def _refuse(self) -> Reading:
        """Return what was held of a call that is not one as text."""
        if not self._form.begin:
            yield from self._rest()
        text, self._held = "".join(self._held or ()), None
        self._say_or_hold(text)

    # ---- reading a text that comes in pieces ----

    def _more(self) -> Reading:
        if self._has_ended:
            raise _EndError
        yield

    def _take(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        if self._held is not None and text:
            self._held.append(text)
        return text

    def _run(self, pattern: re.Pattern[str], most: int | None = None) -> Reading:
        """Return the characters that a pattern matches, however many pieces they come in."""
        parts: list[str] = []
        while True:
            match = pattern.match(self._buffer)
            assert match is not None, "a pattern that matches nothing, too"
            parts.append(self._take(match.end()))
            if most is not None and sum(map(len, parts)) > most:
                raise _NotACallError
            if self._buffer or self._has_ended:
                return "".join(parts)
            yield

    def _skip(self) -> Reading:
        return self._run(_SPACE)

    def _which(self, options: Sequence[str]) -> Reading:
        """Return which of some texts comes next, the longest; None for none of them."""
        while True:
            buffer = self._buffer
            if not self._has_ended and any(
                len(buffer) < len(each) and each.startswith(buffer) for each in options
            ):
                yield
                continue
            return max((o for o in options if o and buffer.startswith(o)), key=len, default=None)

    def _is_next(self, text: str) -> Reading:
        """Read white space, and a text if it comes next; return whether it does."""
        yield from self._skip()
        if not (yield from self._which((text,))):
            return False
        self._take(len(text))
        return True

    def _expect(self, text: str) -> Reading:
        if text and not (yield from self._is_next(text)):
            raise _EndError if self._has_ended and text.startswith(self._buffer) else _NotACallError

    def _until(self, tag: str, emit: Emit, most: int | None = None) -> Reading:
        """Emit what comes before a tag."""
        num = 0
        while True:
            at = self._buffer.find(tag)
            length = at if at >= 0 else len(self._buffer) - num_begun(self._buffer, (tag,))
            num += length
            if most is not None and num > most:
                raise _NotACallError
            if length:
                emit(self._take(length))
            if at >= 0:
                return
            yield from self._more()

    def _seek(self, tag: str, end: str) -> Reading:
        """Drop what comes before a tag or an end; return whether it is the tag."""
        while True:
            ats = {each: at for each in (tag, end) if (at := self._buffer.find(each)) >= 0}
            if ats:
                first = min(ats, key=ats.__getitem__)
                self._take(ats[first])
                return first == tag
            self._take(len(self._buffer) - num_begun(self._buffer, (tag, end)))
            yield from self._more()

    # ---- calls ----

    def _open(self, call: Call) -> None:
        """Begin a call whose arguments are emitted next; return it if its function is known."""
        self._call, self._arguments = call, []
        if call.name in self._tools:
            self._found.append(call)
            self._gap, self._held, self._is_in_call = [], None, True

    def _emit(self, text: str) -> None:
        self._arguments.append(text)

    def _emit_inner(self, text: str) -> None:
        self._arguments.append(tool_values.quoted(text)[1:-1])

    def _return_arguments(self) -> None:
        text, self._arguments = "".join(self._arguments), []
        if text:
            self._found.append(MoreArguments(text))

    def _close(self) -> None:
        """Return the rest of a call, or all of it."""
        if self._is_in_call:
            self._return_arguments()
        else:
            arguments = "".join(self._arguments)
            if not tool_values.is_json(arguments):
                raise _NotACallError
            self._found.append(replace(self._call, arguments=arguments))
        self._gap, self._held, self._is_in_call = [], None, False

    def _json_calls(self, call: JsonCall) -> Reading:
        """Read one call, or a list of them."""
        is_list = yield from self._is_next("[")
        yield from self._json_call(call)
        while is_list and (yield from self._is_next(",")):
            yield from self._json_call(call)
        if is_list:
            yield from self._expect("]")

    def _json_call(self, call: JsonCall) -> Reading:
        yield from self._expect("{")
        name: str | None = None
        arguments: str | None = None
        is_returned = False
        is_next = yield from self._is_next("}")
        while not is_next:
            key = yield from self._json_string()
            yield from self._expect(":")
            yield from self._skip()
            if call.is_keyed and name is None:
                name, key = key, call.arguments
            if key == call.name and name is None and self._buffer.startswith('"'):
                name = yield from self._json_string()
            elif key in ("arguments", "parameters") and arguments is None and not is_returned:
                if name in self._tools and self._buffer.startswith("{"):
                    self._open(Call(name, ""))
                    yield from self._json(self._emit)
                    self._close()
                    is_returned = True
                else:
                    parts: list[str] = []
                    yield from self._json(parts.append)
                    arguments = "".join(parts)
            else:
                yield from self._json(_drop)
            is_next = yield from self._is_next("}")
            if not is_next:
                yield from self._expect(",")
        if is_returned:
            return
        if name is None or (arguments is None and not self._form.begin):
            raise _NotACallError
        self._open(Call(name, ""))
        self._emit(tool_values.arguments_of(arguments))
        self._close()

    def _named_call(self, call: NamedCall) -> Reading:
        yield from self._expect(call.begin.strip())
        yield from self._skip()
        written = yield from self._run(_NAME, _MAX_HEADER)
        if not self._buffer:
            yield from self._more()
        match = _ID.fullmatch(written) if call.is_numbered else None
        name, id = (written, None) if match is None else (match[1], written)
        is_strange = not self._form.begin and self._tools and name not in self._tools
        if not name or is_strange:
            raise _NotACallError
        if call.mark:
            yield from self._until(call.mark, _drop, _MAX_HEADER)
            self._take(len(call.mark))
        else:
            yield from self._expect(call.after.strip())
        arguments, new = call.arguments, Call(name, "", id)
        if isinstance(arguments, JsonArguments):
            yield from self._json_arguments(new)
        elif isinstance(arguments, TaggedArguments):
            yield from self._tagged(new, call, arguments)
        elif isinstance(arguments, PythonArguments):
            yield from self._python(new)
        else:
            yield from self._quoted(new, arguments.quote)
        self._close()
        if isinstance(arguments, (JsonArguments, TaggedArguments)) and call.end:
            yield from self._is_next(call.end.strip())

    def _kinds(self, call: Call, key: str) -> frozenset[str]:
        """Return the types that an argument may have."""
        root = self._tools.get(call.name, {})
        return tool_values.kinds_of(tool_values.property_of(root, key), root)

    # ---- arguments ----

    def _json_string(self) -> Reading:
        """Return the text of a JSON string."""
        yield from self._skip()
        yield from self._expect('"')
        parts = ['"']
        yield from self._in_string('"', parts.append)
        text = tool_values.text_of("".join(parts))
        if text is None:
            raise _NotACallError
        return text

    def _in_string(self, quote: str, emit: Emit) -> Reading:
        """Emit the rest of a string, with the quote that ends it."""
        pattern = _IN_STRING if quote == '"' else _IN_QUOTES
        while True:
            match = pattern.match(self._buffer)
            assert match is not None, "a pattern that matches nothing, too"
            has_ended = self._buffer.startswith(quote, match.end())
            if length := match.end() + has_ended:
                emit(self._take(length))
            if has_ended:
                return
            yield from self._more()

    def _json(self, emit: Emit) -> Reading:
        """Emit a JSON value as it is written, with literals that JSON does not have as strings."""
        depth = 0
        while True:
            if not self._buffer:
                yield from self._more()
                continue
            first = self._buffer[0]
            if first == '"':
                emit(self._take(1))
                yield from self._in_string('"', emit)
            elif first in "{[":
                depth += 1
                emit(self._take(1))
            elif first in "}]":
                depth -= 1
                emit(self._take(1))
            elif first in ",:" or first.isspace():
                emit((yield from self._run(_COMMAS)))
                continue
            else:
                text = yield from self._run(_LITERAL)
                if not text:
                    raise _NotACallError
                emit(text if self._has_ended and not self._buffer else tool_values.literal(text))
            if depth <= 0:
                return

    def _json_arguments(self, call: Call) -> Reading:
        yield from self._skip()
        if self._buffer.startswith("{"):
            self._open(call)
            yield from self._json(self._emit)
        elif not self._buffer:
            yield from self._more()
        elif (yield from self._which((self._end,) if self._end else ())):
            self._open(call)
            self._emit("{}")
        else:
            raise _NotACallError

    def _tagged(self, call: Call, named: NamedCall, arguments: TaggedArguments) -> Reading:
        begin, middle = arguments.begin, arguments.middle.strip()
        following = tuple(filter(None, (begin, named.end.strip(), self._end)))
        yield from self._skip()
        is_first = True
        while (found := (yield from self._which(following))) == begin:
            self._take(len(begin))
            keys: list[str] = []
            yield from self._until(middle, keys.append)
            self._take(len(middle))
            key = "".join(keys)
            before, kinds = arguments.value, self._kinds(call, key)
            if arguments.json:
                is_json = yield from self._which((before, arguments.json))
                kinds = frozenset({"string"})
                if is_json == arguments.json:
                    before, kinds = arguments.json, tool_values.EVERY_KIND - kinds
            yield from self._expect(before)
            if is_first:
                self._open(call)
            self._emit(("{" if is_first else ", ") + tool_values.quoted(key) + ": ")
            is_first = False
            if kinds == {"string"}:
                self._emit('"')
                yield from self._plain(arguments, following, self._emit_inner)
                self._emit('"')
            else:
                parts: list[str] = []
                yield from self._plain(arguments, following, parts.append)
                self._emit(tool_values.of_kinds("".join(parts), kinds))
            yield from self._skip()
        if found is None:
            if not self._buffer:
                yield from self._more()
            raise _NotACallError
        if is_first:
            self._open(call)
            self._emit("{}")
        else:
            self._emit("}")

    def _plain(self, arguments: TaggedArguments, following: Sequence[str], emit: Emit) -> Reading:
        """Emit the text of a value up to its end tag, which something of the call follows."""
        end = arguments.end.strip()
        opens_line = (arguments.value or arguments.middle).endswith("\n")
        ends_line = arguments.end.startswith("\n")
        if opens_line and (yield from self._which(("\n",))):
            self._take(1)
        while True:
            buffer = self._buffer
            at = buffer.find(end)
            if at < 0:
                at = len(buffer) - num_begun(buffer, (end,))
                rest = None
            else:
                rest = buffer[at + len(end) :].lstrip()
            if rest is not None and any(map(rest.startswith, following)):
                break
            is_open = rest is None or any(each.startswith(rest) for each in following)
            if rest == "" and len(buffer) - at - len(end) > _MAX_SPACE:
                is_open = False
            if self._has_ended and rest == "":
                break
            if not is_open:  # the tag is a part of the value
                emit(self._take(at + len(end)))
                continue
            kept = at - 1 if ends_line and buffer[at - 1 : at] == "\n" else at
            if kept:
                emit(self._take(kept))
            yield from self._more()
        text = self._take(at)
        emit(text.removesuffix("\n") if ends_line else text)
        self._take(len(end))

    def _python(self, call: Call) -> Reading:
        self._open(call)
        self._emit("{")
        is_first = True
        while not (yield from self._is_next(")")):
            if not is_first:
                yield from self._expect(",")
                yield from self._skip()
            key = yield from self._run(_PYTHON_NAME)
            yield from self._expect("=")
            parts: list[str] = []
            yield from self._python_value(parts.append)
            value = tool_values.of_python("".join(parts), self._kinds(call, key))
            self._emit(("" if is_first else ", ") + f"{tool_values.quoted(key)}: {value}")
            is_first = False
        self._emit("}")

    def _python_value(self, emit: Emit) -> Reading:
        """Emit the text up to the comma or the bracket after a value."""
        depth = 0
        while True:
            emit((yield from self._run(_PYTHON_CODE)))
            if not self._buffer:
                yield from self._more()
                continue
            first = self._buffer[0]
            if depth == 0 and first in ",)":
                return
            depth += (first in "([{") - (first in ")]}")
            if depth < 0:
                raise _NotACallError
            emit(self._take(1))
            if first in "\"'":
                yield from self._in_string(first, emit)

    def _quoted(self, call: Call, quote: str) -> Reading:
        """Emit the rest of an object whose keys have no quotes."""
        self._open(call)
        self._emit("{")
        closing = ["}"]
        is_key, key = True, ""
        while closing:
            yield from self._skip()
            found = yield from self._which((quote, "{", "[", "}", "]", ","))
            if found == closing[-1]:
                self._emit(self._take(1))
                closing.pop()
                is_key = False
            elif found == ",":
                self._take(1)
                self._emit(", ")
                is_key = closing[-1] == "}"
            elif is_key:
                text = ""
                if found == quote:
                    self._take(len(quote))
                    parts: list[str] = []
                    yield from self._until(quote, parts.append)
                    self._take(len(quote))
                    text = "".join(parts)
                else:
                    text = (yield from self._run(_BARE_KEY)).rstrip()
                yield from self._expect(":")
                key = text if len(closing) == 1 else key
                self._emit(tool_values.quoted(text) + ": ")
                is_key = False
            elif found == quote:
                self._take(len(quote))
                self._emit('"')
                yield from self._until(quote, self._emit_inner)
                self._emit('"')
                self._take(len(quote))
            elif found in ("{", "["):
                self._emit(self._take(1))
                closing.append("}" if found == "{" else "]")
                is_key = found == "{"
            elif found is None:
                text = yield from self._run(_BARE_VALUE)
                if not text:
                    yield from self._more()
                    raise _NotACallError
                kinds = self._kinds(call, key) if len(closing) == 1 else tool_values.EVERY_KIND
                self._emit(tool_values.of_kinds(text.rstrip(), kinds))
            else:
                raise _NotACallError


def _drop(_: str) -> None:
    """Ignore a text."""
