"""Forced calls are in the notation of the family, match the tool's schema, and are read back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxserve.core.errors import InvalidGrammarError
from jaxserve.models import tool_calls
from jaxserve.models.tool_calls import ToolFormat
from jaxserve.models.tool_grammars import grammar_of
from tests.common.matching import MARK, matching
from tests.models.test_tool_templates import read

pytestmark = pytest.mark.fast

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "force": {"type": "boolean"},
        "tags": {"$ref": "#/$defs/tags"},
    },
    "required": ["text", "count"],
    "additionalProperties": False,
    "$defs": {"tags": {"type": "array", "items": {"type": "string", "enum": ["x", "y"]}}},
}
SAVE = {"name": "save", "parameters": PARAMETERS}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}}}
JSON = '{"text": "a\\n</b>", "count": 5, "force": true, "tags": ["x"]}'
# A call as the family writes it; the count and the force are changed below. See `tool_templates`
# for the sources.
CALLS: list[tuple[ToolFormat, str]] = [
    (tool_calls.HERMES, f'<tool_call>\n{{"name": "save", "arguments": {JSON}}}\n</tool_call>'),
    (tool_calls.LIST, f'<tool_call>[{{"name": "save", "arguments": {JSON}}}]</tool_call>'),
    (tool_calls.MISTRAL, f'[TOOL_CALLS][{{"name": "save", "arguments": {JSON}}}]'),
    (tool_calls.MISTRAL_ARGS, f"[TOOL_CALLS]save[ARGS]{JSON}"),
    (tool_calls.LLAMA3, f'{{"name": "save", "parameters": {JSON}}}'),
    (tool_calls.NEMOTRON, f'<TOOLCALL>[{{"name": "save", "arguments": {JSON}}}]</TOOLCALL>'),
    (
        tool_calls.COMMAND,
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "save", '
        f'"parameters": {JSON}}}\n]<|END_ACTION|>',
    ),
    (tool_calls.GRANITE, f'<|tool_call|>[{{"name": "save", "arguments": {JSON}}}]'),
    (
        tool_calls.PYTHONIC,
        '[save(text="a\\n</b>", count=5, force=True, tags=["x"])]',
    ),
    (
        tool_calls.LFM2,
        '<|tool_call_start|>[save(text="a\\n</b>", count=5, force=True, tags=["x"])]'
        "<|tool_call_end|>",
    ),
    (
        tool_calls.SEED,
        "<seed:tool_call>\n<function=save>\n<parameter=text>a\n</b></parameter>\n"
        "<parameter=count>5</parameter>\n<parameter=force>true</parameter>\n"
        '<parameter=tags>["x"]</parameter>\n</function>\n</seed:tool_call>',
    ),
    (
        tool_calls.QWEN3_CODER,
        "<tool_call>\n<function=save>\n<parameter=text>\na\n</b>\n</parameter>\n<parameter=count>\n"
        "5\n</parameter>\n<parameter=force>\ntrue\n</parameter>\n<parameter=tags>\n"
        '["x"]\n</parameter>\n</function>\n</tool_call>',
    ),
    (tool_calls.FUNCTIONARY, f"<function=save>{JSON}</function>"),
    (
        tool_calls.GLM,
        "<tool_call>save\n<arg_key>text</arg_key>\n<arg_value>a\n</b></arg_value>\n"
        "<arg_key>count</arg_key>\n<arg_value>5</arg_value>\n"
        "<arg_key>force</arg_key>\n<arg_value>true</arg_value>\n"
        '<arg_key>tags</arg_key>\n<arg_value>["x"]</arg_value>\n</tool_call>',
    ),
    (
        tool_calls.MINIMAX,
        '<minimax:tool_call>\n<invoke name="save">\n<parameter name="text">a\n</b></parameter>\n'
        '<parameter name="count">5</parameter>\n<parameter name="force">true</parameter>\n'
        '<parameter name="tags">["x"]</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    (
        tool_calls.DEEPSEEK_V3,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>save\n```json\n"
        f"{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        tool_calls.DEEPSEEK_V31,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>save<｜tool▁sep｜>"
        f"{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        tool_calls.DEEPSEEK_V32,
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="save">\n'
        '<｜DSML｜parameter name="text" string="true">a\n</b></｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="count" string="false">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="force" string="false">true</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="tags" string="false">["x"]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    (
        tool_calls.GIGACHAT35,
        '<｜GCML｜tool_calls>\n<｜GCML｜invoke name="save">\n'
        '<｜GCML｜parameter name="text" string="true">a\n</b></｜GCML｜parameter>\n'
        '<｜GCML｜parameter name="count" string="false">5</｜GCML｜parameter>\n'
        '<｜GCML｜parameter name="force" string="false">true</｜GCML｜parameter>\n'
        '<｜GCML｜parameter name="tags" string="false">["x"]</｜GCML｜parameter>\n'
        "</｜GCML｜invoke>\n</｜GCML｜tool_calls>",
    ),
    (
        tool_calls.GIGACHAT,
        f'<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "save", "arguments": {JSON}}}',
    ),
    (tool_calls.APERTUS, f'<|tools_prefix|>[{{"save": {JSON}}}]<|tools_suffix|>'),
    (
        tool_calls.TOOL_CALLS,
        f'<tool_calls>[{{"name": "save", "arguments": {JSON}}}]</tool_calls>',
    ),
    (
        tool_calls.KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.save:0"
        f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    (
        tool_calls.HARMONY,
        f"<|channel|>commentary to=functions.save <|constrain|>json<|message|>{JSON}<|call|>",
    ),
    (
        tool_calls.FUNCTIONGEMMA,
        "<start_function_call>call:save{text:<escape>a\n</b><escape>,count:5,force:true,"
        "tags:[<escape>x<escape>]}<end_function_call>",
    ),
    (
        tool_calls.GEMMA4,
        '<|tool_call>call:save{text:<|"|>a\n</b><|"|>,count:5,force:true,'
        'tags:[<|"|>x<|"|>]}<tool_call|>',
    ),
]
WANTED = json.loads(JSON)


def _grammar(form: ToolFormat, *tools: Any, several: bool = False) -> str:
    return grammar_of(form, tools or (SAVE, NOW), lambda text: None, may_be_several=several)


@pytest.mark.parametrize(("form", "text"), CALLS)
def test_a_forced_call_is_as_the_family_writes_it(form, text):
    """The call matches; one with a wrong type, without what is required, or cut short does not."""
    truth = "True" if form in (tool_calls.PYTHONIC, tool_calls.LFM2) else "true"
    wrong = [text.replace("5", "five"), text.replace(truth, "7"), text[:-1], text.replace("x", "z")]
    wrong += [text.replace("save", "other"), text.replace("count", "number"), text + text]
    assert matching(_grammar(form), [text, *wrong]) == [text]
    content, ((name, arguments),) = read(form, text, {"save": PARAMETERS})
    assert (content, name, json.loads(arguments)) == ("", "save", WANTED)


@pytest.mark.parametrize(("form", "text"), CALLS)
def test_several_calls_are_as_the_family_writes_them(form, text):
    """Two calls match where the format has several, and only if they are allowed."""
    call = text.removeprefix(form.begin + form.opening).removesuffix(form.closing + form.end)
    two = f"{text}{form.separator}{text}"
    if form.between is not None:
        calls = f"{call}{form.between}{call}"
        two = f"{form.begin}{form.opening}{calls}{form.closing}{form.end}"
    elif form.separator is None:
        two = text + text
    matches = matching(_grammar(form, several=True), [text, two])
    has_one = form.between is None and form.separator is None
    assert matches == ([text] if has_one else [text, two])
    assert matching(_grammar(form), [two]) == []
    assert len(read(form, two, {"save": PARAMETERS})[1]) == 2


def _of_text(form: ToolFormat, schema: dict[str, Any], needed: bool = True) -> str:
    properties = {"text": schema}
    parameters = {"type": "object", "properties": properties, "required": ["text"] * needed}
    return _grammar(form, {"name": "save", "parameters": parameters})


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "enum": ["a b", ""]}, ["a b", ""], ["a"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é\nc"], ["a", "abcd"]),
        ({"type": "string", "pattern": "^[a-z]+/$"}, ["ab/"], ["AB/", "ab/ "]),
        ({"type": "string", "pattern": "b{2}"}, ["abba"], ["aba"]),
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "today"]),
        ({"type": "string", "format": "date-time"}, ["2024-02-29T10:00:00Z"], ["2024-02-29T1"]),
        ({"type": ["string", "null"]}, ["x", "null"], []),
        ({"type": "number", "minimum": 3}, ["3.5"], ["2", "x"]),
    ],
)
@pytest.mark.parametrize("form", [tool_calls.QWEN3_CODER, tool_calls.GLM, tool_calls.MINIMAX])
def test_plain_text_matches_the_schema(form, schema, right, wrong):
    """A value of plain text has the bounds and the pattern of its schema."""
    call = next(text for each, text in CALLS if each is form)
    begin, _, rest = call.partition("a\n</b>")
    after = "\n</parameter>\n" if form is tool_calls.QWEN3_CODER else "</parameter>\n"
    after = "</arg_value>\n" if form is tool_calls.GLM else after
    end = (
        "</tool_call>"
        if form is tool_calls.GLM
        else rest[rest.index("</", rest.rindex(after) + len(after)) :]
    )
    texts = [f"{begin}{value}{after}{end}" for value in (*right, *wrong)]
    assert matching(_of_text(form, schema), texts) == texts[: len(right)]


def test_arguments_that_are_not_required_may_be_left_out():
    """In every notation, together with the comma after them."""
    properties = {key: {"type": "integer"} for key in "abc"}
    tool = {"name": "f", "parameters": {"properties": properties, "required": ["b"]}}
    texts = ["[f(b=1)]", "[f(a=1, b=2)]", "[f(b=1, c=2)]", "[f(a=1, b=2, c=3)]"]
    wrong = ["[f(a=1)]", "[f(, b=1)]", "[f(b=1, )]", "[f()]", "[f(b=1, a=2)]"]
    assert matching(_grammar(tool_calls.PYTHONIC, tool), texts + wrong) == texts
    tool["parameters"] = {"properties": properties}
    texts = ["[f()]", "[f(a=1)]", "[f(c=1)]", "[f(a=1, c=2)]", "[f(a=1, b=2, c=3)]"]
    wrong = ["[f(, b=1)]", "[f(b=1, )]", "[f(b=1, a=2)]"]
    assert matching(_grammar(tool_calls.PYTHONIC, tool), texts + wrong) == texts


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "string", "format": "hostname"}, '"format": "hostname"'),
        ({"type": "string", "pattern": "^a|b$"}, "anchors"),
        ({"type": "string", "contentEncoding": "base64"}, "contentEncoding"),
    ],
)
def test_what_cannot_be_enforced_is_refused(schema, says):
    """The error names the tool and the part of its schema."""
    with pytest.raises(InvalidGrammarError, match="'save'") as caught:
        _of_text(tool_calls.QWEN3_CODER, schema)
    assert says in str(caught.value)


def test_tags_that_are_tokens_are_those_tokens():
    """A tag within a longer literal, too."""
    tokens = {"<｜tool▁call▁begin｜>": 3, "<｜tool▁sep｜>": 4, "<|call|>": 5, "<|message|>": 6}
    grammar = grammar_of(tool_calls.DEEPSEEK_V3, [NOW], tokens.get, may_be_several=False)
    assert '<[3]> "function" <[4]> "now" "\\n```json\\n"' in grammar
    grammar = grammar_of(tool_calls.HARMONY, [NOW], tokens.get, may_be_several=False)
    assert '"now" " <|constrain|>json" <[6]>' in grammar and "<[5]>" in grammar


def test_a_mark_within_tags_is_a_token():
    """Also in the tag that ends a value of plain text, in which there is no such token."""
    mark = "｜DSML｜"
    call = next(text for form, text in CALLS if form is tool_calls.DEEPSEEK_V32)
    grammar = grammar_of(tool_calls.DEEPSEEK_V32, [SAVE], {mark: MARK}.get, may_be_several=False)
    right = [call, call.replace("</b>", "</")]
    wrong = [call.replace("5", "five"), call.replace("</b>", f"</{mark}"), call[:-1]]
    assert matching(grammar, [*right, *wrong], mark) == right
    assert matching(grammar, right) == []  # spelt out
