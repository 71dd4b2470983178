"""Thinking is separated from answers, in every family's form and at every split.

The forms are those of the families' chat templates (llama.cpp's `models/templates`, vLLM's
`vllm/reasoning`), the texts are our own.
"""

from __future__ import annotations

import time

import pytest

from jaxserve.models import thinking
from jaxserve.models.thinking import Opening, Thinking, ThinkingFormat, thinking_of

pytestmark = pytest.mark.fast

_FINAL = "<|channel|>final<|message|>"
_ANALYSIS = "<|channel|>analysis<|message|>a<|end|><|start|>assistant"
_CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"

_CODER = "<tool_call>\n<function=f>\n</function>\n</tool_call>"

# Format, opening, text, reasoning, content.
CASES: list[tuple[ThinkingFormat, Opening, str, str, str]] = [
    (thinking.TAGS, "undecided", "<think>\na\n\nb\n</think>\n\nc\n", "a\n\nb", "c\n"),
    (thinking.TAGS, "open", "a\n</think>\n\nc", "a", "c"),
    (thinking.TAGS, "open", "<think>\na</think>c", "a", "c"),
    (thinking.TAGS, "open", " a </thin </think>", "a </thin", ""),
    (thinking.TAGS, "open", "\n a\n", "a", ""),
    (thinking.TAGS, "closed", "c </think>", "", "c </think>"),
    (thinking.TAGS, "closed", "<think>a</think>c", "a", "c"),
    (thinking.TAGS, "undecided", "\n\n<think>\n\n</think>\n\nc", "", "c"),
    (thinking.TAGS, "undecided", " \n<b>c</b>", "", " \n<b>c</b>"),
    (thinking.TAGS, "undecided", "c <think>d</think>", "", "c <think>d</think>"),
    (thinking.TAGS, "undecided", "  <thi", "", "  <thi"),
    (
        thinking.TAGS,
        "open",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "f"}</tool_call>',
        "",
    ),
    (thinking.TAGS, "open", "a</think>\n<tool_call>c", "a", "<tool_call>c"),
    (thinking.TAGS_QWEN, "open", f"a\n\n{_CODER}", "a", _CODER),
    (thinking.TAGS_QWEN, "undecided", f"<think>a{_CODER}{_CODER}", "a", _CODER + _CODER),
    (thinking.TAGS_QWEN, "open", f"a{_CODER}\n</think>\n\nc</think>", "a", f"{_CODER}\nc</think>"),
    (thinking.TAGS_QWEN, "open", f"a{_CODER}b</think>", "a", f"{_CODER}b</think>"),
    (thinking.TAGS_QWEN, "open", f"a</think>\n{_CODER}</think>", "a", f"{_CODER}</think>"),
    (thinking.TAGS_QWEN, "open", "a <tool_call> b\n</think>\n\nc", "a <tool_call> b", "c"),
    (thinking.TAGS_QWEN, "open", "a <tool_call>\n<fun", "a <tool_call>\n<fun", ""),
    (thinking.TAGS_QWEN, "open", "a <tool_call> </think>c", "a <tool_call>", "c"),
    (
        thinking.TAGS_QWEN,
        "open",
        f"a <tool_call>{' ' * 99}<function=",
        f"a <tool_call>{' ' * 99}<function=",
        "",
    ),
    (thinking.TAGS_GLM, "open", "a<tool_call>f</tool_call>", "a", "<tool_call>f</tool_call>"),
    (
        thinking.TAGS_KIMI,
        "open",
        "a <|tool_calls_section_begin|>b<|tool_calls_section_end|></think> c",
        "a",
        "<|tool_calls_section_begin|>b<|tool_calls_section_end|>c",
    ),
    (
        thinking.TAGS_MINIMAX,
        "open",
        'a\n<minimax:tool_call>\n<invoke name="f">',
        "a",
        '<minimax:tool_call>\n<invoke name="f">',
    ),
    (thinking.GRANITE, "undecided", "<think>a</think>\n<response> c\n</response>", "a", "c"),
    (thinking.GRANITE, "undecided", "<think>a</think><response>c </resp", "a", "c </resp"),
    (thinking.GRANITE, "undecided", "c </response>", "", "c </response>"),
    (
        thinking.SPOKEN,
        "undecided",
        "Here is my thought process: a\nHere's my response:\nc",
        "a",
        "c",
    ),
    (thinking.SPOKEN, "undecided", "Here is my thought", "", "Here is my thought"),
    (thinking.MAGISTRAL, "undecided", "[THINK]a[b][/THINK]c", "a[b]", "c"),
    (thinking.GEMMA, "undecided", "<|channel>thought\na\n<channel|>c", "a", "c"),
    (thinking.SEED, "undecided", "<seed:think>a</seed:think>c", "a", "c"),
    (
        thinking.COMMAND,
        "open",
        "a<|END_THINKING|><|START_RESPONSE|>c<|END_RESPONSE|>",
        "a",
        "c",
    ),
    (thinking.APERTUS, "undecided", "<|inner_prefix|>a<|inner_suffix|>c", "a", "c"),
    (
        thinking.APERTUS,
        "undecided",
        '<|inner_prefix|>a<|tools_prefix|>[{"f": {}}]<|tools_suffix|>',
        "a",
        '<|tools_prefix|>[{"f": {}}]<|tools_suffix|>',
    ),
    (thinking.APRIEL, "open", "a\n[b]\n[BEGIN FINAL RESPONSE]\nc", "a\n[b]", "c"),
    (thinking.HARMONY, "open", f"{_ANALYSIS}{_FINAL}c", "a", "c"),
    (thinking.HARMONY, "open", f"{_FINAL}c", "", "c"),
    (
        thinking.HARMONY,
        "open",
        f"{_CALL}{{}}<|end|><|start|>assistant{_FINAL}c",
        "",
        f"{_CALL}{{}}<|call|>c",
    ),
    (thinking.HARMONY, "closed", "c <|channel|>", "", "c <|channel|>"),
    (thinking.HARMONY, "open", "to be", "", "to be"),
    (thinking.HARMONY, "open", "<|channel|>analysis<|message|>a<|end", "a<|end", ""),
    (
        thinking.HARMONY,
        "open",
        f"{_ANALYSIS}<|channel|>analysis<|message|>b"
        "<|end|><|start|>assistant<|channel|>commentary<|message|>c<|end|><|start|>assistant"
        f'{_CALL}{{"x": 1}}',
        "a\nb",
        f'c{_CALL}{{"x": 1}}',
    ),
    (
        thinking.HARMONY,
        "open",
        " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
        "",
        " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
    ),
    (
        thinking.HARMONY,
        "open",
        "<|channel|>commentary to=f <|constrain|>json<|message|>{}<|call|>",
        "",
        "<|channel|>commentary to=f <|constrain|>json<|message|>{}<|call|>",
    ),
    (
        thinking.HARMONY,
        "open",
        "<|channel|>analysis to=python code<|message|>1 + 1<|end|>",
        "1 + 1",
        "",
    ),
]


@pytest.mark.parametrize(("form", "opening", "text", "reasoning", "content"), CASES)
def test_thinking_is_separated_at_every_split(form, opening, text, reasoning, content):
    """Reasoning and content do not depend on where a stream is cut, in two places or everywhere."""
    assert Thinking(form, opening).split(text) == (reasoning, content)
    cuts = [(i, j) for j in range(len(text) + 1) for i in (range(j + 1) if j < 60 else (j,))]
    pieces = [[text[:i], text[i:j], text[j:]] for i, j in cuts]
    for each in [list(text), *pieces]:
        reader = form.reader(opening)
        found = [*map(reader.push, each), reader.finish()]
        assert ("".join(r for r, _ in found), "".join(c for _, c in found)) == (reasoning, content)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}", thinking.TAGS),
        ("{{ m.content.split('</think>')[-1] }}", thinking.TAGS),
        ("<think>\n<response>{{ tool }}</response>", thinking.TAGS),
        ("<think><tool_call><function={{ f }}><parameter={{ p }}>", thinking.TAGS_QWEN),
        ('<think><tool_call>{"name": {{ f }}}', thinking.TAGS),
        ("</think><tool_call>{{ f }}<arg_key>", thinking.TAGS_GLM),
        ("<think></think><|tool_calls_section_begin|>", thinking.TAGS_KIMI),
        ('<think><minimax:tool_call><invoke name="{{ f }}">', thinking.TAGS_MINIMAX),
        ("between <think></think> and <response></response>", thinking.GRANITE),
        ("after 'Here is my thought process:'", thinking.SPOKEN),
        ("[THINK]{{ m.thinking }}[/THINK]", thinking.MAGISTRAL),
        ("<|inner_prefix|>{{ m }}<|inner_suffix|>", thinking.APERTUS),
        ("[BEGIN FINAL RESPONSE] 'Here are my reasoning steps:\\n'", thinking.APRIEL),
        ("<|channel>thought\n<channel|>", thinking.GEMMA),
        ("<|channel|>analysis<|message|>", thinking.HARMONY),
        ("{{ m.content }}", None),
        (None, None),
    ],
)
def test_the_format_is_found_in_the_template(template, form):
    assert thinking_of(template) is form


@pytest.mark.parametrize(
    ("form", "prompt", "opening"),
    [
        (thinking.TAGS, "<|im_start|>assistant\n<think>\n", "open"),
        (thinking.TAGS, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "closed"),
        (thinking.TAGS, "<｜Assistant｜></think>", "closed"),
        (thinking.TAGS, "<|im_start|>assistant\n", "undecided"),
        (thinking.GEMMA, "<|turn>model\n<|channel>thought\n<channel|>", "closed"),
        (thinking.APRIEL, "<|begin_assistant|>\nHere are my reasoning steps:\n", "open"),
        (thinking.HARMONY, "<|start|>assistant", "open"),
    ],
)
def test_the_prompt_says_whether_thinking_is_open(form, prompt, opening):
    assert form.opening(prompt) == opening


def test_a_grammar_has_the_whole_call():
    """Only the mark ends thinking then; a call inside it is a part of it."""
    thinks = Thinking(thinking.TAGS_QWEN, "open").up_to_its_mark()
    assert thinks.split(f"a{_CODER}</think>c") == (f"a{_CODER}", "c")


@pytest.mark.parametrize(
    ("form", "begin"),
    [
        (thinking.TAGS, "<think>"),
        (thinking.TAGS, ""),
        (thinking.TAGS_QWEN, "<think><tool_call>"),
        (thinking.TAGS_QWEN, "<think><tool_call><function="),
        (thinking.HARMONY, "<|channel|>"),
        (thinking.HARMONY, "<|channel|>analysis<|message|>"),
    ],
)
@pytest.mark.parametrize("piece", [" ", "<", "a "])
def test_long_thinking_takes_linear_time(form, begin, piece):
    """Eight times the pieces take less than 32 times the time, also if all of it is held back."""

    def seconds(count: int) -> float:
        reader = form.reader("undecided")
        reader.push(begin)
        begun_s = time.process_time()
        for _ in range(count):
            reader.push(piece)
        reader.finish()
        return time.process_time() - begun_s

    few_s = min(seconds(500) for _ in range(3))
    assert min(seconds(4_000) for _ in range(3)) < 32 * few_s + 0.01
