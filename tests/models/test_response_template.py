"""Response templates of transformers are recognised as the formats that are read here.

Their notation, and what is read by them, are transformers' own (5.24.0): `utils/chat_parsing`.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from jaxserve.models import thinking, tool_calls
from jaxserve.models.response_template import formats_of
from jaxserve.models.thinking import Opening, Thinking
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.models.tool_calls import written
from tests.common.vocabularies import byte_level
from tests.models.test_tool_templates import read

pytestmark = pytest.mark.fast

_FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_CALL = {"type": "function", "function": "{content}"}


def _template(**fields: dict[str, Any]) -> dict[str, Any]:
    return {"defaults": {"role": "assistant"}, "start_anchor": "<answer>", "fields": fields}


_QWEN35 = _template(
    reasoning_content={"open": "<think>", "close": "</think>"},
    tool_calls={
        "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
        },
        "transform": _FUNCTION,
    },
    content={"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
)
# Response templates, and the formats that they read. Those of Qwen and Gemma are as in
# `cli/serving/utils.py`, which has them for folders without one, and the others as in its tests.
_CASES = {
    "Qwen3": (
        _template(
            reasoning_content={"open": "<think>", "close": "</think>"},
            tool_calls={
                "open_pattern": r"\s*<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": _CALL,
            },
            content={"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
        ),
        thinking.TAGS,
        tool_calls.HERMES,
    ),
    "Qwen3.5": (_QWEN35, thinking.TAGS, tool_calls.QWEN3_CODER),
    "Gemma 4": (
        _template(
            reasoning_content={"open": "<|channel>thought\n", "close": "<channel|>"},
            tool_calls={
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": _FUNCTION,
            },
            content={"close": ["<turn|>", "<|tool_response>", "<eos>"]},
        ),
        thinking.GEMMA,
        tool_calls.GEMMA4,
    ),
    "gpt-oss": (
        _template(
            thinking={"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
            content={"open": "<|channel|>final<|message|>", "close": "<|end|>"},
            tool_calls={
                "open_pattern": r"<\|channel\|>commentary to=functions\."
                r"(?P<name>\w+).*?<\|message\|>",
                "close": "<|call|>",
                "repeats": True,
                "content": "json",
                "transform": _FUNCTION,
            },
        ),
        thinking.HARMONY,
        tool_calls.HARMONY,
    ),
    "Command A": (
        _template(
            thinking={"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
            content={"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
            tool_calls={
                "open": "<|START_ACTION|>",
                "close": "<|END_ACTION|>",
                "content": "json",
                "transform_each": True,
                "transform": {"function": {"name": "{tool_name}", "arguments": "{parameters}"}},
            },
        ),
        thinking.COMMAND,
        tool_calls.COMMAND,
    ),
    # Its chat template has "<think>", and says nothing of the marks around the answer.
    "Ernie 4.5": (
        _template(
            thinking={"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
            content={"open": "<response>\n", "close_pattern": r"\n?</response>"},
            tool_calls={
                "open": "<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": _CALL,
            },
        ),
        thinking.GRANITE,
        tool_calls.HERMES,
    ),
    "LFM2": (
        _template(
            reasoning={"open": "<think>", "close": "</think>"},
            content={},
            tool_calls={
                "open": "<|tool_call_start|>",
                "close": "<|tool_call_end|>",
                "content": "python-call-list",
                "transform_each": True,
                "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
            },
        ),
        thinking.TAGS,
        tool_calls.LFM2,
    ),
}


@pytest.mark.parametrize(("template", "thinks", "calls"), _CASES.values(), ids=_CASES)
def test_a_response_template_says_the_formats(template, thinks, calls, caplog):
    """Whatever the chat template has in it; and both readers then agree about an answer."""
    assert formats_of(template, None, tool_calls.LIST) == (thinks, calls)
    assert formats_of(template, thinking.SPOKEN, tool_calls.LLAMA3) == (thinks, calls)
    assert not caplog.records
    wanted = [{"name": "f", "arguments": {"a": "b c", "d": "e f"}}]
    first = thinks.first or thinks.starts[0]
    called = f"{first}\na{thinks.closing}\n{thinks.head}{written(calls, wanted)}"
    for text in (thinks.written("a\n b", "c\n\nd"), called):
        opening: Opening = "undecided"
        if thinks is thinking.GRANITE:  # the prompt ends with the first mark
            opening, text = "open", text.removeprefix(first)
        theirs = parse_response(text, template, prefix="")
        reasoning, content = Thinking(thinks, opening).split(text)
        content, found = read(calls, [content], {})
        names = ("reasoning_content", "reasoning", "thinking")
        assert reasoning.strip() == next(theirs[name] for name in names if name in theirs)
        assert content.strip() == theirs.get("content", "")
        made = [{"name": name, "arguments": json.loads(text)} for name, text in found]
        assert made == [call["function"] for call in theirs.get("tool_calls", ())]


def test_a_format_with_the_same_marks_is_kept():
    """The chat template's format knows more: in Qwen3.5 a call ends the thinking, too."""
    found = formats_of(_QWEN35, thinking.TAGS_QWEN, tool_calls.QWEN3_CODER)
    assert found == (thinking.TAGS_QWEN, tool_calls.QWEN3_CODER)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            _template(
                thinking={"open_pattern": r"[^<]*<\|content_thinking\|>", "close": "<|end|>"},
                tool_calls={"open": "<|json|>", "close": "<|end|>", "content": "json"},
            ),
            "reads reasoning in a form that is not supported",
        ),
        (_template(content={"open": 1}), "is not valid"),
        ({"fields": {}}, "is not valid"),
    ],
)
def test_a_response_template_that_is_not_known_changes_nothing(template, said, caplog):
    """A warning says so, and what the chat template has in it counts."""
    with caplog.at_level(logging.WARNING):
        found = formats_of(template, thinking.TAGS, tool_calls.HERMES)
    assert found == (thinking.TAGS, tool_calls.HERMES)
    assert said in caplog.text


def test_a_folder_s_response_template_counts(tmp_path):
    """Also in the folders that are made of it."""
    template = _CASES["Ernie 4.5"][0]
    given = {"chat_template": "{{ '<think>' }}", "response_template": template}
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    byte_level().save_pretrained(tmp_path / "a")
    settings = tmp_path / "a" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | given))
    first = Tokenizer.from_folder(tmp_path / "a")
    assert first.thinking is thinking.GRANITE
    assert first.tool_format is tool_calls.HERMES
    first.save(tmp_path / "b")
    first.save_pretrained(tmp_path / "c")
    for read_again in (Tokenizer.load(tmp_path / "b"), Tokenizer.from_folder(tmp_path / "c")):
        assert read_again.thinking is thinking.GRANITE
