"""Response templates: how transformers reads the answers of a model, if its folder says it.

A template (`response_template` in tokenizer_config.json, since transformers 5.13) has regions of
the text, each with its own beginning, end and parser. What each of our formats writes is given to
that parser once, when the tokenizer is read. If the reasoning, the content and the calls come out
as they were, the model writes that format. Its answers are then read by our own reader, which
streams arguments and has grammars, the end of thinking for a budget, and a tenth of the time for an
answer. Other answers are read by the regions (`RegionReader`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from jaxserve.models import thinking, tool_calls
from jaxserve.models.thinking import Phase, ThinkingFormat
from jaxserve.models.tool_calls import ToolFormat

_log = logging.getLogger(__name__)

_THOUGHT, _ANSWER = "some thoughts", "an answer"
# What transformers and templates call the field of the reasoning.
_REASONING = ("reasoning_content", "reasoning", "thinking")
_CALLS = [
    {"name": "look_up", "arguments": {"city": "Paris", "unit": "m"}},
    {"name": "send", "arguments": {"text": "a b"}},
]

_TOOLS = "tool_calls"


@final
@dataclass(frozen=True, eq=False)
class Regions:
    """A response template whose regions are read (`RegionReader`).

    Attributes:
      template: transformers' own, except that calls come as plain text and with what was captured.
      fields: those of transformers, by name.
    """

    template: Any
    fields: Mapping[str, Any]


def formats_of(
    template: Mapping[str, Any], thinks: ThinkingFormat | None, calls: ToolFormat
) -> tuple[ThinkingFormat | None, ToolFormat, Regions | None]:
    """Return the formats that a response template reads, or its regions if one is none of ours.

    `thinks` and `calls` are those of the chat template. They stay where the response template says
    nothing. With a warning they also stay if it is not valid.
    """
    try:
        from transformers.utils.chat_parsing import parse_response
        from transformers.utils.chat_parsing.response_templates import load_response_template
    except ImportError:
        _log.warning(
            "the model has a response template, which transformers reads from 5.13 on; reasoning "
            "and calls are read as the chat template has them. Install a newer transformers"
        )
        return thinks, calls, None
    try:
        loaded = load_response_template(dict(template))
    except (TypeError, ValueError) as error:
        _log.warning(
            "the model's response template is not valid: %s; reasoning and calls are read as the "
            "chat template has them",
            error,
        )
        return thinks, calls, None

    def read(text: str) -> dict[str, Any]:
        try:
            return parse_response(text, loaded, prefix="")
        except (KeyError, TypeError, ValueError):  # not in this format
            return {}

    thinks_found, calls_found = [thinks], [calls]
    if any(name in loaded.fields for name in _REASONING):
        others = () if thinks is None else (thinks,)
        is_read = _thinks_in(read, has_content="content" in loaded.fields)
        thinks_found = [*filter(is_read, (*others, *thinking.FORMATS))]
    if _TOOLS in loaded.fields:
        calls_found = [*filter(_calls_in(read), (calls, *tool_calls.FORMATS))]
    if thinks_found and calls_found:
        return thinks_found[0], calls_found[0], None
    _log.info("answers are read by the model's response template, which is none of our formats")
    if "content" not in loaded.fields and loaded.implicit is None:
        fields = {**template["fields"], "content": {}}  # for the text outside of regions
        loaded = load_response_template({**template, "fields": fields})
    return thinking.REGIONS, tool_calls.HERMES, _regions(loaded)


def _regions(loaded: Any) -> Regions:
    fields = {name: replace(field, optional=True) for name, field in loaded.fields.items()}
    if _TOOLS in fields:
        field = fields[_TOOLS]
        names = {name for end in (field.open_re, field.close_re) if end for name in end.groupindex}
        fields[_TOOLS] = replace(
            field,
            content="text",
            content_args={"strip": False},
            repeats=True,
            transform={name: f"{{{name}}}" for name in ("content", *names)},
            transform_each=False,
        )
    return Regions(replace(loaded, fields=fields), dict(loaded.fields))


def _thinks_in(
    read: Callable[[str], Mapping[str, Any]], *, has_content: bool
) -> Callable[[ThinkingFormat], bool]:
    def is_read(form: ThinkingFormat) -> bool:
        text = form.written(_THOUGHT, _ANSWER)
        # In some families the prompt has the first mark, and the response template none.
        for each in (text, text.removeprefix(form.first or form.starts[0])):
            found = read(each)
            thought = next((found[name] for name in _REASONING if name in found), None)
            if thought == _THOUGHT and (found.get("content") == _ANSWER or not has_content):
                return True
        return False

    return is_read


def _calls_in(read: Callable[[str], Mapping[str, Any]]) -> Callable[[ToolFormat], bool]:
    def is_read(form: ToolFormat) -> bool:
        found = read(tool_calls.written(form, _CALLS)).get(_TOOLS)
        each = found if isinstance(found, list) else [found]
        return [call.get("function") for call in each if isinstance(call, dict)] == _CALLS

    return is_read


@final
class RegionReader:
    """Reads an answer by the regions of a response template; see `thinking.ThinkingReader`.

    Calls are part of the content, in the format HERMES, when they are whole. One that the end cuts
    is left out, and one whose parser fails is its text. `prompt` is the end of the prompt, in which
    the answer may have begun.
    """

    def __init__(self, regions: Regions, prompt: str):
        from transformers.utils.chat_parsing import ResponseParser

        has_begun = regions.template.start_anchor_re.search(prompt)
        self._parser = ResponseParser(regions.template, prefix=prompt if has_begun else "")
        self._fields = regions.fields
        self._text: tuple[list[str], list[str]] = ([], [])
        self._spaces = ""  # that are dropped if the region ends
        self._is_empty = True  # no text in the region
        self._has_ended = self._has_failed = False
        self.phase: Phase = "start"
        self.has_thought = False
        self._take(self._parser.initial_events)
        self._text, self.has_thought = ([], []), self.phase == "thinking"

    def push(self, text: str) -> tuple[str, str]:
        return self._read(text, lambda: self._parser.feed(text))

    def finish(self) -> tuple[str, str]:
        self._has_ended = True
        return self._read("", lambda: self._parser.finalize()[1])

    def _read(self, text: str, read: Callable[[], Iterable[Mapping[str, Any]]]) -> tuple[str, str]:
        """Return what a piece of text adds; all of it, and of the rest, after a failure."""
        if not self._has_failed:
            try:
                self._take(read())
                text = ""
            except (KeyError, TypeError, ValueError) as error:
                self._has_failed = True
                _log.warning("the model's response template cannot be followed: %r", error)
        reasoning, content = ("".join(each) for each in self._text)
        self._text = [], []
        return reasoning, content + text

    def _take(self, events: Iterable[Mapping[str, Any]]) -> None:
        for event in events:
            name, kind = event["field"], event["type"]
            if kind == "region_open":
                self._open(name)
            elif kind == "region_chunk" and name != _TOOLS:
                self._say(name, event["text"])
            elif kind == "region_close":
                self._close(name, event["value"])

    def _open(self, name: str) -> None:
        self._spaces, self._is_empty = "", True
        if name in _REASONING:
            if self.has_thought:
                join = self._fields[name].join
                self._text[0].append("\n" if join is None else join)
            self.phase, self.has_thought = "thinking", True
        elif name == _TOOLS:
            self.phase = "answer"

    def _say(self, name: str, text: str) -> None:
        said = self._text[0 if name in _REASONING else 1]
        if not self._fields[name].content_args.get("strip", True):
            said.append(text)
            self._is_empty = False
        else:
            text = text.lstrip() if self._is_empty else text
            body = text.rstrip()
            if body:
                said += [self._spaces, body]
                self._spaces, self._is_empty = "", False
            if not self._is_empty:
                self._spaces += text[len(body) :]
        if name not in _REASONING and not self._is_empty:
            self.phase = "answer"

    def _close(self, name: str, value: Any) -> None:
        if name in _REASONING:
            self.phase = "answer"
        elif name == _TOOLS:
            self._text[1].append(self._call(value))

    def _call(self, found: Mapping[str, Any]) -> str:
        from transformers.utils.chat_parsing.content_parsers import process_field

        field, body = self._fields[_TOOLS], str(found["content"])
        captures = {name: text for name, text in found.items() if name != "content"}
        try:
            value = process_field(body, field, captures)
            calls = [call["function"] for call in (value if isinstance(value, list) else [value])]
            return tool_calls.written(tool_calls.HERMES, calls)
        except (KeyError, TypeError, ValueError, RecursionError):
            is_cut = self._has_ended and field.close_re is not None
            return "" if is_cut else body
