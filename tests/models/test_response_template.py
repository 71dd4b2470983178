"""Response templates of transformers are recognised as the formats that are read here.

Their notation, and what is read by them, are transformers' own (5.24.0): `utils/chat_parsing`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from jaxserve.core.errors import InvalidRequestError
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import TextAssembler
from jaxserve.engine.requests import RequestBuilder
from jaxserve.models import thinking, tool_calls
from jaxserve.models.response_template import RegionReader, Regions, formats_of
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
    assert formats_of(template, None, tool_calls.LIST) == (thinks, calls, None)
    known = thinking.SPOKEN, tool_calls.LLAMA3
    assert formats_of(template, *known) == (thinks, calls, None)
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
    assert found == (thinking.TAGS_QWEN, tool_calls.QWEN3_CODER, None)


# Blocks that all have the same frame, as in transformers' tests, and tags of no model, without a
# region for the content.
_BLOCK = {"close": "<|end|>", "repeats": True}
_FREE = {**_BLOCK, "join": "", "content_args": {"strip": False}}
_FRAME = r"(?:<\|model\|>)?[^<]*"
_BLOCKS = _template(
    thinking={"open_pattern": rf"{_FRAME}<\|thinking\|>", **_FREE},
    content={"open_pattern": rf"{_FRAME}<\|text\|>", **_FREE},
    tool_calls={
        "open_pattern": rf"{_FRAME}<\|json\|>",
        **_BLOCK,
        "content": "json",
        "transform": {"function": {"name": "{content.name}", "arguments": "{content.args}"}},
    },
)
_LINES = _template(
    reasoning={"open": "<why>", "close": "</why>"},
    tool_calls={
        "open_pattern": r"\[call (?P<name>\w+)\]\n",
        "close": "[/call]",
        "repeats": True,
        "content": "kv-lines",
        "content_args": {"kv_sep": "="},
        "transform": _FUNCTION,
    },
)
_BLOCKS_TEXT = (
    "a<|thinking|> b c<|end|><|model|><|text|>d\n<|end|><|model|><|text|> e<|end|>"
    '<|model|>f<|json|>{"name": "g", "args": {"x": 1}}<|end|>'
)
_LINES_TEXT = "<why>\n b c\n</why>\n\nd\n e\n\n[call g]\nx=1\ny=h i\n[/call]\n[call j]\n[/call]"


def _regions(template: dict[str, Any]) -> Regions:
    thinks, calls, regions = formats_of(template, thinking.TAGS, tool_calls.LIST)
    assert (thinks, calls) == (thinking.REGIONS, tool_calls.HERMES) and regions is not None
    return regions


def _read_regions(regions: Regions, pieces: Sequence[str], prompt: str = "") -> Any:
    """Return the reasoning, the content, and the names and arguments of the calls."""
    reader = RegionReader(regions, prompt)
    found = [*map(reader.push, pieces), reader.finish()]
    content, made = read(tool_calls.HERMES, ["".join(text for _, text in found)], {})
    return "".join(text for text, _ in found), content, [(n, json.loads(a)) for n, a in made]


@pytest.mark.parametrize(
    ("template", "text", "reasoning", "content", "calls"),
    [
        (_BLOCKS, _BLOCKS_TEXT, " b c", "d\n e", [("g", {"x": 1})]),
        (_LINES, _LINES_TEXT, "b c", "d\n e", [("g", {"x": "1", "y": "h i"}), ("j", {})]),
    ],
    ids=["blocks", "lines"],
)
def test_other_answers_are_read_by_the_regions(template, text, reasoning, content, calls):
    """As transformers reads them, and alike however they are cut."""
    theirs = parse_response(text, template, prefix="")
    assert reasoning == theirs.get("thinking", theirs.get("reasoning"))
    assert content == theirs.get("content", content)
    made = [call["function"] for call in theirs["tool_calls"]]
    assert [(call["name"], call["arguments"]) for call in made] == calls
    wanted, regions = (reasoning, content, calls), _regions(template)
    assert _read_regions(regions, [text]) == _read_regions(regions, text) == wanted
    for at in range(len(text)):
        assert _read_regions(regions, [text[:at], text[at:]]) == wanted


def test_the_regions_of_a_stream_of_tokens():
    """In pieces the same as the whole, and the tokens of the thinking are counted."""
    tokenizer = byte_level(chat_template="{{ 1 }}", response_template=_LINES)
    thinks = tokenizer.thinking_after(tokenizer.encode("<answer>"))
    assert thinks is not None and not thinks.is_writable
    decoder = tokenizer.stream_decoder(shown=thinks.shown)
    assembler = TextAssembler(decoder, (), thinking=thinks)
    parts = []
    for token in tokenizer.encode(_LINES_TEXT, False):
        assembler.push([token])
        parts.append(assembler.take(is_final=False))
    assembler.finish()
    parts.append(assembler.take(is_final=True))
    assert tuple("".join(each) for each in zip(*parts, strict=True)) == assembler.parts()
    assert assembler.parts()[0] == "b c" and assembler.parts()[1].startswith("d\n e<tool_call>")
    thought = _LINES_TEXT[: _LINES_TEXT.index("\n\nd")]
    assert assembler.num_reasoning == len(tokenizer.encode(thought, False))


def test_regions_may_begin_in_the_prompt():
    """What it has of the answer is not repeated, and what is before that is not read."""
    prompt = "<|text|>z<answer><|thinking|>"
    regions = _regions(_BLOCKS)
    assert _read_regions(regions, ["b<|end|><|text|>c"], prompt) == ("b", "c", [])
    reader = RegionReader(regions, prompt)
    assert reader.push("b") == ("b", "") and reader.phase == "thinking" and reader.has_thought
    assert reader.push("<|end|>") == ("", "") and reader.phase == "answer"
    assert RegionReader(regions, "<|thinking|>").phase == "start"  # of an earlier answer


def test_calls_that_are_cut_or_broken():
    """The end of the answer drops what it cuts; what no parser reads stays as text."""
    regions = _regions(_BLOCKS)
    at = _BLOCKS_TEXT.index('"args"')
    assert _read_regions(regions, [_BLOCKS_TEXT[:at]]) == (" b c", "d\n e", [])
    broken = _BLOCKS_TEXT.replace("1}}", "1}")
    assert _read_regions(regions, [broken]) == _read_regions(regions, broken)
    assert _read_regions(regions, [broken])[1:] == ('d\n e{"name": "g", "args": {"x": 1}', [])


def test_what_is_read_only_cannot_be_demanded():
    """No grammar and no budget: how such an answer is written is not known."""
    tokenizer = byte_level(chat_template="{{ messages[0].content }}", response_template=_BLOCKS)
    requests = RequestBuilder(
        tokenizer, eos_token_ids=(), vocab_size=400, max_prompt_tokens=lambda: 99, seed=0
    )
    chat = [{"role": "user", "content": "a"}]
    for params in ({"regex": "a"}, {"max_thinking_tokens": 3}):
        with pytest.raises(InvalidRequestError, match="response template"):
            requests.build(chat, SamplingParams(**params), 0.0)
    assert requests.build(chat, SamplingParams(), 0.0).thinking is not None


@pytest.mark.parametrize("template", [_template(content={"open": 1}), {"fields": {}}])
def test_a_response_template_that_is_not_valid_changes_nothing(template, caplog):
    """A warning says so, and what the chat template has in it counts."""
    with caplog.at_level(logging.WARNING):
        found = formats_of(template, thinking.TAGS, tool_calls.HERMES)
    assert found == (thinking.TAGS, tool_calls.HERMES, None)
    assert "is not valid" in caplog.text


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
