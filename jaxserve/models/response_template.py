"""Recognises the response template of a model's folder as one of the formats that are read here.

transformers reads answers by a response template (`response_template` in tokenizer_config.json,
since 5.13): regions of the text, each with its own beginning, end and parser. What a format writes
is given to that parser once, when the tokenizer is read. If the reasoning, the content and the
calls come out as they were, the model writes that format. Its answers are then read by our own
reader, which streams arguments and has grammars, the end of thinking for a budget, and a tenth of
the time for an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from jaxserve.models import thinking, tool_calls
from jaxserve.models.thinking import ThinkingFormat
from jaxserve.models.tool_calls import ToolFormat

_log = logging.getLogger(__name__)

_THOUGHT, _ANSWER = "some thoughts", "an answer"
# What transformers and templates call the field of the reasoning.
_REASONING = ("reasoning_content", "reasoning", "thinking")
_CALLS = [
    {"name": "look_up", "arguments": {"city": "Paris", "unit": "m"}},
    {"name": "send", "arguments": {"text": "a b"}},
]

Form = TypeVar("Form")


def formats_of(
    template: Mapping[str, Any], thinks: ThinkingFormat | None, calls: ToolFormat
) -> tuple[ThinkingFormat | None, ToolFormat]:
    """Return the formats that a response template reads.

    `thinks` and `calls` are those of the chat template. They stay where the response template says
    nothing, or, with a warning, nothing that is known.
    """
    try:
        from transformers.utils.chat_parsing import parse_response
        from transformers.utils.chat_parsing.response_templates import load_response_template
    except ImportError:
        _log.warning(
            "the model has a response template, which transformers reads from 5.13 on; reasoning "
            "and calls are read as the chat template has them. Install a newer transformers"
        )
        return thinks, calls
    try:
        loaded = load_response_template(dict(template))
    except (TypeError, ValueError) as error:
        _log.warning(
            "the model's response template is not valid: %s; reasoning and calls are read as the "
            "chat template has them",
            error,
        )
        return thinks, calls

    def read(text: str) -> dict[str, Any]:
        try:
            return parse_response(text, loaded, prefix="")
        except (KeyError, TypeError, ValueError):  # not in this format
            return {}

    if any(name in loaded.fields for name in _REASONING):
        others = () if thinks is None else (thinks,)
        has_content = "content" in loaded.fields
        is_read = _thinks_in(read, has_content)
        thinks = _first((*others, *thinking.FORMATS), is_read, "reasoning") or thinks
    if "tool_calls" in loaded.fields:
        calls = _first((calls, *tool_calls.FORMATS), _calls_in(read), "calls of tools") or calls
    return thinks, calls


def _thinks_in(
    read: Callable[[str], Mapping[str, Any]], has_content: bool
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
        found = read(tool_calls.written(form, _CALLS)).get("tool_calls")
        each = found if isinstance(found, list) else [found]
        return [call.get("function") for call in each if isinstance(call, dict)] == _CALLS

    return is_read


def _first(forms: Iterable[Form], is_read: Callable[[Form], bool], what: str) -> Form | None:
    """Return the first format that is read; None, and warn, if none is."""
    for form in forms:
        if is_read(form):
            return form
    _log.warning(
        "the model's response template reads %s in a form that is not supported here; they are "
        "read as the chat template has them",
        what,
    )
    return None
