"""Calls of tools in text: every format is read as it is written, however the text is cut."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import pytest

from jaxserve.models.tool_calls import (
    DEEPSEEK_V31,
    FORMATS,
    HARMONY,
    HERMES,
    KIMI,
    LFM2,
    LIST,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    JsonCall,
    ToolFormat,
    format_of,
    with_calls_as_text,
    with_instruction,
)
from jaxserve.models.tool_reader import Call, CallReader, MoreArguments

pytestmark = pytest.mark.fast

A = Call("add", '{"x": 1, "y": "<b>"}')
B = Call("now", "{}")
NOW = '{"name": "now", "arguments": {}}'
TAGGED = '{"name": "tag", "arguments": {"a": "\\"</tool_call> {["}}'
C = Call("tag", '{"a": "\\"</tool_call> {["}')
OOPS = "<tool_call>oops</tool_call>"
# Format, text, and what is in it.
TEXTS: list[tuple[ToolFormat, str, list[str | Call]]] = [
    (HERMES, "plain < text <tool", ["plain < text <tool"]),
    (
        HERMES,
        'So: <tool_call>\n{"name": "add", "arguments": {"x": 1, "y": "<b>"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        ["So:", A, B],
    ),
    (HERMES, "<tool_call>oops</tool_call> x", ["<tool_call>oops</tool_call> x"]),
    (HERMES, '<tool_call>{"name": "no', ['<tool_call>{"name": "no']),
    (
        LIST,
        '<tool_call>[{"name": "add", "arguments": {"x": 1, "y": "<b>"}}, '
        '{"name": "now", "arguments": {}}]</tool_call>',
        [A, B],
    ),
    (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"x": 1, "y": "<b>"}}]', [A]),
    (MISTRAL, "[TOOL] is text", ["[TOOL] is text"]),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "add", "arguments": {"x": 1, "y": "<b>"}, "id": "}], {"}, '
        '{"name": "now", "arguments": {} , "id": {"a": [1]}} ]x',
        [A, B, "x"],
    ),
    (
        LLAMA3,
        '{"name": "add", "parameters": {"x": 1, "y": "<b>"}, "id": "1}"}; '
        '{"name": "now", "parameters": {}, "more": {}}',
        [A, B],
    ),
    (
        HERMES,
        '<tool_call>{"name": "now", "arguments": {}, "id": "1"}\n</tool_call>x',
        [B, "x"],
    ),
    (
        LIST,
        '<tool_call>[{"name": "now", "arguments": {}, "id": "1, 2"}, '
        '{"name": "add", "arguments": {"x": 1, "y": "<b>"}, "id": "]"}]</tool_call>x',
        [B, A, "x"],
    ),
    (
        LLAMA3,
        '{"name": "add", "parameters": {"x": 1, "y": "<b>"}}; {"name": "now", "parameters": {}}',
        [A, B],
    ),
    (LLAMA3, '<|python_tag|>{"name": "now", "parameters": {}}', [B]),
    (LLAMA3, 'It is {"name": "now"}', ['It is {"name": "now"}']),
    (LLAMA3, '{"city": "Rome"} is JSON', ['{"city": "Rome"} is JSON']),
    (HERMES, f"So:\n<tool_call>{NOW}</tool_call>\n\nThen", ["So:", B, "\n\nThen"]),
    (HERMES, f"\n \n<tool_call>{NOW}</tool_call>\n <tool_call>{NOW}</tool_call>\n", [B, B]),
    (LIST, "\n text ", ["\n text "]),
    (LIST, " \n", [" \n"]),
    (LIST, f"\n {OOPS}", [f"\n {OOPS}"]),
    (LIST, f"So: \n{OOPS} \n", [f"So: \n{OOPS} \n"]),
    (HERMES, f"So \n <tool_call>{NOW}</tool_call>\nThen \n", ["So", B, "\nThen \n"]),
    (HERMES, f"So \n < <tool_call>{NOW}</tool_call> ", ["So \n <", B]),
    (HERMES, "So \n<tool_call>{", ["So \n<tool_call>{"]),
    (MISTRAL, f"So \n[TOOL_CALLS]\n[{NOW}]", ["So", B]),
    (LLAMA3, '\n {"city": 1} \n', ['\n {"city": 1} \n']),
    (LIST, f"<tool_call>oops</tool_call>\n<tool_call>[{NOW}]</tool_call>", [OOPS, B]),
    (MISTRAL, f"\n[TOOL_CALLS] [{NOW}] \nso", [B, " \nso"]),
    (MISTRAL, '[TOOL_CALLS] [{"a": oops}] [', ['[TOOL_CALLS] [{"a": oops}] [']),
    (LLAMA3, '\n{"name": "now", "parameters": {}} so', [B, " so"]),
    # gpt-oss also calls on the channel of its thinking; openai-harmony 0.0.8 reads both.
    (HARMONY, "<|channel|>analysis to=functions.now code<|message|>{}<|call|>", [B]),
    (HARMONY, "<|channel|>commentary to=functions.now<|message|>{}<|call|>", [B]),
    (HARMONY, "<|channel|>commentary to=func", ["<|channel|>commentary to=func"]),
    (HARMONY, "<|channel|>commentary to=now <|constrain|>json<|message|>{}<|call|>", [B]),
    (
        HARMONY,
        "<|start|>assistant<|channel|>analysis to=functions.now<|constrain|>json<|message|>{}",
        [B],
    ),
    (
        MISTRAL_ARGS,
        "So[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}[TOOL_CALLS]now[ARGS]{}",
        ["So", B, B],
    ),
    # An end tag is missing, as vLLM 0.32's Hermes parser allows, or stands in a string.
    (HERMES, f"<tool_call>{NOW}", [B]),
    (HERMES, f"So <tool_call>{NOW}\n ", ["So", B]),
    (LIST, f"<tool_call>[{NOW}, {NOW}]", [B, B]),
    (HERMES, f"<tool_call>{TAGGED}</tool_call>x", [C, "x"]),
    (HERMES, f"<tool_call>{TAGGED}", [C]),
    (HERMES, f"<tool_call>\n{TAGGED}\n</tool_call>\n<tool_call>{NOW}</tool_call>", [C, B]),
    (LIST, f"<tool_call>[{TAGGED}, {NOW}]</tool_call>x", [C, B, "x"]),
    (LIST, f"<tool_call>[{NOW}, {TAGGED}]</tool_call> x", [B, C, " x"]),
    (HERMES, "<tool_call>{</tool_call>x", ["<tool_call>{</tool_call>x"]),
    (HERMES, '<tool_call>"</tool_call>"</tool_call>x', ['<tool_call>"</tool_call>"</tool_call>x']),
]


def _cuts(text: str) -> list[list[int]]:
    """Return places to cut: nowhere, everywhere, around words and tags, and at random."""
    rng = random.Random(text)
    drawn = [sorted(rng.sample(range(len(text)), min(5, len(text)))) for _ in range(20)]
    words = [at.start() for at in re.finditer(r"\s+|\S+", text)][1:]
    tags = [each for at in re.finditer(r"</?tool_call>|\[TOOL_CALLS\]", text) for each in at.span()]
    return [[], list(range(1, len(text))), words, tags, *drawn]


@pytest.mark.parametrize(("form", "text", "wanted"), TEXTS)
def test_calls_are_read_however_the_text_is_cut(form, text, wanted):
    """Whole, by characters and cut at random, the text gives the same content and calls."""
    for cut in _cuts(text):
        reader = CallReader(form)
        ends = [0, *cut, len(text)]
        found: list[str | Call] = []
        for start, end in zip(ends, ends[1:], strict=False):
            found += reader.push(text[start:end])
        found += reader.finish()
        calls = [each for each in found if isinstance(each, Call)]
        content = "".join(each for each in found if isinstance(each, str))
        assert calls == [each for each in wanted if isinstance(each, Call)]
        assert content == "".join(each for each in wanted if isinstance(each, str))


def test_formats_are_told_by_the_template():
    """The chat template of a family says how it writes calls."""
    assert format_of("{{ tools }} <tool_call>") is HERMES
    assert format_of("{{ tools }} [TOOL_CALLS]") is MISTRAL
    assert format_of('{{ tools }} "parameters": <|python_tag|>') is LLAMA3
    # LFM2's own templates write the tools, and no calls (llama.cpp's `LFM2*.jinja`).
    assert format_of("List of tools: <|tool_list_start|>[{{ tools }}") is LFM2
    assert format_of("List of tools: [{{ tools }}") is LFM2
    assert format_of("{{ messages }}") is LIST
    assert format_of(None) is LIST


def test_templates_without_tools_get_an_instruction():
    """The system message lists the functions; calls and results of the history become text."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    said = with_instruction(LIST, with_calls_as_text(LIST, messages), tools)
    assert said[0]["content"].startswith("Be brief.\n\n")
    assert json.dumps([tools[0]["function"]]) in said[0]["content"]
    assert said[2]["content"] == '<tool_call>[{"name": "add", "arguments": {"x": 1}}]</tool_call>'
    assert said[3] == {"role": "user", "content": "<tool_response>2</tool_response>"}


def test_the_instruction_shows_the_family_s_own_notation():
    """DeepSeek's templates write calls of the history, and no tools (llama.cpp 0374c5b)."""
    template = (
        "{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{% endfor %}"
    )
    form = format_of(template)
    assert form is DEEPSEEK_V31
    (first,) = with_instruction(form, [], [])
    assert first["content"].endswith(
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name1<｜tool▁sep｜>{"argument1": "value1"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )


@pytest.mark.parametrize("form", FORMATS)
def test_calls_as_text_are_calls(form):
    """What the history has in place of calls that a template does not write is read as these."""
    given = [{"function": {"name": "add", "arguments": {"x": i}}} for i in range(2)]
    message = {"role": "assistant", "content": "", "tool_calls": given}
    (said,) = with_calls_as_text(form, [message])
    reader = CallReader(form)
    found = [*reader.push(said["content"]), *reader.finish()]
    ids = [None, None] if form is not KIMI else ["functions.add:0", "functions.add:1"]
    assert found == [Call("add", f'{{"x": {i}}}', ids[i]) for i in range(2)]


def _key(form: ToolFormat) -> str:
    assert isinstance(form.call, JsonCall)
    return form.call.arguments


@pytest.mark.parametrize("form", [HERMES, LIST, MISTRAL, LLAMA3])
def test_deeply_nested_calls_are_text(form):
    """What cannot be read without a RecursionError is no call."""
    deep = "[" * 5000 + "]" * 5000
    body = f'{{"name": "add", "{_key(form)}": {deep}}}'
    text = form.begin + (form.opening + body + form.closing) + form.end
    reader = CallReader(form)
    found = [*reader.push(text), *reader.finish()]
    assert all(isinstance(each, str) for each in found)
    assert deep in "".join(map(str, found))


CALL = '<tool_call>{"name": "now", '
OTHER = '"name": "other", "arguments": {}'
LISTED = f"<tool_call>[{NOW}, "


def _joined(parts: list[Any]) -> list[str | Call]:
    """Return parts with each call's arguments as one text, and texts side by side as one."""
    found: list[str | Call] = []
    for part in parts:
        if isinstance(part, MoreArguments):
            last = found[-1]
            assert isinstance(last, Call)
            found[-1] = Call(last.name, last.arguments + part.text)
        elif isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


@pytest.mark.parametrize(
    ("form", "text", "wanted"),
    [
        *TEXTS,
        (HERMES, CALL + '"arguments": {"a": [1', [Call("now", '{"a": [1')]),
        (HERMES, CALL + '"arguments": {"a": 1</tool_call>x', [Call("now", '{"a": 1'), "x"]),
        (LIST, LISTED + "{" + OTHER + "}]</tool_call>", [B, Call("other", "{}")]),
        (MISTRAL, f"[TOOL_CALLS][{NOW}, {NOW}]x", [B, B, "x"]),
        (MISTRAL, f"[TOOL_CALLS][{NOW}, {{{OTHER}}}, {NOW}]x", [B, Call("other", "{}"), B, "x"]),
        (HERMES, "<tool_call>{" + OTHER + "}</tool_call>", [Call("other", "{}")]),
        (HERMES, CALL + '"arguments": {}, "id": </tool_call>x', [B, "x"]),
        (LLAMA3, '{"name": "now", "parameters": {}, "id": "', [B]),
        (LLAMA3, '{"name": "now", "parameters": {} x', [B, "x"]),
    ],
)
def test_arguments_are_streamed_however_the_text_is_cut(form, text, wanted):
    """A known function's call comes when it begins, its arguments as they come; all is the same."""
    for cut in _cuts(text):
        reader = CallReader(form, {"add": {}, "now": {}})
        found = []
        for begin, end in zip([0, *cut], [*cut, len(text)], strict=True):
            found += reader.push(text[begin:end])
        assert _joined(found + reader.finish()) == wanted, cut


def _cpu_s(form: ToolFormat, text: str) -> float:
    """Return the processor's time to read a text in pieces of four characters."""
    reader = CallReader(form, {"now": {}})
    begun_s = time.process_time()
    for i in range(0, len(text), 4):
        reader.push(text[i : i + 4])
    reader.finish()
    return time.process_time() - begun_s


def _long(kind: str, form: ToolFormat, count: int) -> str:
    """Return a text that is held back for long."""
    if kind == "white space in a call":
        return f"{form.begin}{' ' * 7 * count}"
    if kind == "white space behind text":
        return f"So{' ' * 7 * count}"
    if kind == "white space behind arguments":
        return f'{form.begin}{{"name": "now", "{_key(form)}": {{}}{" " * 7 * count}'
    if kind == "braces in a name":
        return f'{form.begin}{{"name": "{"{" * 7 * count}'
    body = f'{{"name": "other", "{_key(form)}": {{"a": [{"[{}], " * count}1]}}}}'
    return form.begin + (form.opening + body + form.closing) + form.end


@pytest.mark.parametrize("form", [LIST, LLAMA3])
@pytest.mark.parametrize(
    "kind",
    [
        "a call whose name is not known",
        "white space in a call",
        "white space behind text",
        "white space behind arguments",
        "braces in a name",
    ],
)
def test_what_is_held_back_is_read_once(form, kind):
    """Eight times the text takes about eight times as long, not 64 times."""
    short = max(0.001, min(_cpu_s(form, _long(kind, form, 200)) for _ in range(2)))
    assert min(_cpu_s(form, _long(kind, form, 1_600)) for _ in range(2)) < 24 * short


def test_arguments_come_before_the_call_ends():
    """Each piece of the arguments is returned at once."""
    reader = CallReader(HERMES, {"add": {}})
    assert reader.push('<tool_call>{"name": "add", "arguments": {"x"') == [
        Call("add", ""),
        MoreArguments('{"x"'),
    ]
    assert reader.push(': "</tool') == [MoreArguments(': "</tool')]
    assert reader.push('"}') == [MoreArguments('"}')]
    assert reader.push("}</tool_call>") == [] == reader.finish()
