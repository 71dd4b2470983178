"""Calls of earlier answers, as chat templates read them, and tools beside a response format."""

from __future__ import annotations

from typing import Any

import llguidance
import pytest

from jaxserve.core.errors import GrammarFailedError, InvalidGrammarError
from jaxserve.engine.grammars import read_vocabulary
from jaxserve.server.routes.chat import ChatRequest
from jaxserve.server.schema import as_template_message
from jaxserve.server.tools import Tools
from tests.common.vocabularies import byte_level

pytestmark = pytest.mark.fast

ARGUMENTS = '{"a":  1, "b": "x \\u00e9"}'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
_EACH = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %};{% endfor %}"
)
TEXT = _EACH.replace("CALL", "({{ c.function.arguments }})")
OBJECT = _EACH.replace("CALL", "({{ c.function.arguments | tojson }})")


def _prompt(arguments: str, tools: Any, **templates: str) -> str:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "call_1"},
    ]
    asked = {"model": "m", "messages": messages} | ({"tools": tools} if tools else {})
    body = ChatRequest.model_validate(asked)
    tokenizer = byte_level(**templates)
    said = [as_template_message(message) for message in body.messages]
    given = Tools(body.tools, None, None, tokenizer)
    prompt = tokenizer.decode(given.prompt(said), False)
    # A conversation keeps them as the template reads them.
    assert tokenizer.decode(given.prompt(given.as_said(said)), False) == prompt
    return prompt


@pytest.mark.parametrize("arguments", [ARGUMENTS, "{not JSON", "", "[]", '"text"'])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_template_that_takes_text_gets_what_was_sent(tools, arguments):
    """Its prompt has the very text, as a model wrote it; invalid JSON too.

    As `apply_chat_template` of transformers 5.24.0 gives it for the messages that were sent.
    """
    prompt = _prompt(arguments, tools, chat_template="{% if tools %}{% endif %}" + TEXT)
    assert prompt == f"user:q;assistant:({arguments});tool:7;"


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_template_without_tools_has_calls_as_text(tools):
    """The text of the call is the JSON of an object, in the form that the instruction asks for."""
    prompt = _prompt(ARGUMENTS, tools, chat_template=TEXT)
    assert (
        '<tool_call>[{"name": "f", "arguments": {"a": 1, "b": "x \\u00e9"}}]</tool_call>' in prompt
    )


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_other_templates_get_objects(tools):
    """Their prompt has the JSON that the template makes of them; text that is not JSON stays."""
    template = "{% if tools %}{% endif %}" + OBJECT
    for arguments, shown in (
        (ARGUMENTS, '{"a": 1, "b": "x é"}'),
        ("[1,2]", "[1, 2]"),
        ("{not JSON", '"{not JSON"'),
        ("NaN", '"NaN"'),
    ):
        prompt = _prompt(arguments, tools, chat_template=template)
        assert prompt == f"user:q;assistant:({shown});tool:7;"


def test_the_template_for_tools_decides_where_tools_are_given():
    """Each of two templates gets calls as it reads them, and the one for tools says the format."""
    named = {"chat_template": OBJECT, "tool_template": "{{ tools | length }}" + TEXT}
    assert _prompt(ARGUMENTS, TOOLS, **named) == f"1user:q;assistant:({ARGUMENTS});tool:7;"
    shown = '{"a": 1, "b": "x é"}'
    assert _prompt(ARGUMENTS, None, **named) == f"user:q;assistant:({shown});tool:7;"


CALL = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("template", "call"),
    [
        ("", f"<tool_call>[{CALL}]</tool_call>"),
        ("{{ tools }}<tool_call>", f"<tool_call>\n{CALL}\n</tool_call>"),
    ],
)
def test_a_grammar_of_calls_or_of_a_schema(template: str, call: str):
    """One of them is the whole answer, and a demanded call leaves the schema out."""
    tokenizer = byte_level(chat_template=template)
    vocabulary = read_vocabulary(llguidance, tokenizer, (2,), tokenizer.vocab_size)
    body = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "q"}], "tools": TOOLS}
    )
    schema = {"type": "object", "properties": {"color": {"enum": ["red", 2**53 + 1]}}}
    schema |= {"required": ["color"], "additionalProperties": False}

    def takes(grammar: str, text: str) -> bool:
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = tokenizer.encode(text, False, parse_special=False)
        return matcher.consume_tokens(tokens) and matcher.is_accepting()

    tools = Tools(body.tools, None, None, tokenizer)
    grammar = tools.or_answer(schema)["grammar"]
    answers = ['{"color": "red"}', f'{{"color": {2**53 + 1}}}']
    assert all(takes(grammar, text) for text in (call, *answers))
    assert not any(takes(grammar, text) for text in ('{"color": "blue"}', "red", "[]"))
    demanded = Tools(body.tools, "required", None, tokenizer).or_answer(schema)["grammar"]
    assert takes(demanded, call) and not takes(demanded, answers[0])
    assert tools.reader().push(answers[0], "stop") == [answers[0]]
    with pytest.raises(GrammarFailedError, match="json_schema"):
        tools.reader().push('{"color": "blue"}', "stop")
    with pytest.raises(InvalidGrammarError, match="minProperties"):
        tools.or_answer({"type": "object", "minProperties": 3})
