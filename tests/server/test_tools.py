"""Calls of earlier answers, as chat templates read them, and tools beside a response format."""

from __future__ import annotations

from typing import Any

import llguidance
import pytest

from jaxserve.core.errors import GrammarFailedError, InvalidGrammarError
from jaxserve.engine.grammars import read_vocabulary
from jaxserve.server.routes.chat import ChatRequest
from jaxserve.server.schema import Tool, as_template_message
from jaxserve.server.tools import Answered, Tools, deltas, whole
from tests.common.vocabularies import byte_level

pytestmark = pytest.mark.fast

HERMES = "{% if tools %}{% endif %}<tool_call>"

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


@pytest.mark.parametrize("arguments", [ARGUMENTS, "{not JSON", "[]", '"text"'])
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
        ("", "{}"),
        ("NaN", '"NaN"'),
    ):
        prompt = _prompt(arguments, tools, chat_template=template)
        assert prompt == f"user:q;assistant:({shown});tool:7;"


def test_a_template_that_writes_tools_and_no_calls():
    """SmolLM3's reads `xml_tools`, and writes the content of answers only."""
    template = "{% if xml_tools %}{{ xml_tools | length }} <tool_call>{% endif %}"
    template += "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x \\u00e9"}}\n</tool_call>'
    assert _prompt(ARGUMENTS, TOOLS, chat_template=template) == (
        f"1 <tool_call>user:q;assistant:{call};user:<tool_response>7</tool_response>;"
    )


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_arguments_that_are_empty_are_an_empty_object(tools):
    """As OpenAI's clients send them for a call without arguments, and mistral-common 1.8 reads."""
    text = _prompt("", tools, chat_template="{% if tools %}{% endif %}" + TEXT)
    assert text == "user:q;assistant:({});tool:7;"
    assert '"arguments": {}' in _prompt("", tools, chat_template=TEXT)


def test_the_template_for_tools_decides_where_tools_are_given():
    """Each of two templates gets calls as it reads them, and the one for tools says the format."""
    named = {"chat_template": OBJECT, "tool_template": "{{ tools | length }}" + TEXT}
    assert _prompt(ARGUMENTS, TOOLS, **named) == f"1user:q;assistant:({ARGUMENTS});tool:7;"
    shown = '{"a": 1, "b": "x é"}'
    assert _prompt(ARGUMENTS, None, **named) == f"user:q;assistant:({shown});tool:7;"


CALL = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("template", "call", "head"),
    [
        ("", f"<tool_call>[{CALL}]</tool_call>", ""),
        ("{{ tools }}<tool_call>", f"<tool_call>\n{CALL}\n</tool_call>", ""),
        (
            "{{ tools }}<|channel|>functions",
            '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
            "<|channel|>final<|message|>",
        ),
    ],
)
def test_a_grammar_of_calls_or_of_a_schema(template: str, call: str, head: str):
    """One of them is the whole answer, and a demanded call leaves the schema out.

    An answer of gpt-oss is a message with a head, as its calls are (openai-harmony 0.0.8).
    """
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
    assert all(takes(grammar, text) for text in (call, *(head + answer for answer in answers)))
    assert not any(takes(grammar, head + text) for text in ('{"color": "blue"}', "red", "[]"))
    assert not head or not takes(grammar, answers[0])
    demanded = Tools(body.tools, "required", None, tokenizer).or_answer(schema)["grammar"]
    assert takes(demanded, call) and not takes(demanded, head + answers[0])
    assert tools.reader().push(answers[0], "stop") == [answers[0]]
    with pytest.raises(GrammarFailedError, match="json_schema"):
        tools.reader().push('{"color": "blue"}', "stop")
    with pytest.raises(InvalidGrammarError, match="minProperties"):
        tools.or_answer({"type": "object", "minProperties": 3})


# ---- answers ----


def _reader() -> Answered:
    body = ChatRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "q"}], "tools": TOOLS}
    )
    return Tools(body.tools, None, None, byte_level(chat_template=HERMES)).reader()


def _whole(text: str, reason: str) -> tuple[str | None, list[str], str]:
    """Return the content, the arguments of the calls and the finish reason of a whole answer."""
    answered = _reader()
    message = whole(answered.push(text, reason))
    calls = [call.function.arguments for call in message.tool_calls or []]
    return message.content, calls, answered.finish_reason(reason)


def _streamed(text: str, reason: str, size: int) -> tuple[str | None, list[str], str]:
    """Return the same of an answer that comes in pieces of `size` characters."""
    answered, content, calls = _reader(), "", list[str]()
    for at in range(0, len(text), size):
        is_last = at + size >= len(text)
        for delta in deltas(answered.push(text[at : at + size], reason if is_last else None)):
            content += delta.content or ""
            for call in delta.tool_calls or []:
                calls += [""] if call.id else []
                calls[-1] += call.function.arguments
    return content or None, calls, answered.finish_reason(reason)


ONE = '<tool_call>\n{"name": "f", "arguments": {"a": "1"}}\n</tool_call>'
CUT = '\n<tool_call>\n{"name": "f", "arguments": {"a": "and so'


def test_calls_before_the_cut_are_kept():
    """An answer that `max_tokens` cuts has the whole calls, and no markup as content.

    The right value is in the issue "Thinking, tools and the clients that people use". A stream has
    sent the beginning of the cut call; OpenAI's finish reason `length` says that it is cut.
    """
    assert _whole(ONE + CUT, "length") == (None, ['{"a": "1"}'], "length")
    assert _whole("So: " + ONE + CUT[:30], "length") == ("So:", ['{"a": "1"}'], "length")
    assert _whole("So: " + CUT, "length") == ("So:", [], "length")
    for size in (1, 7):
        streamed = _streamed(ONE + CUT, "length", size)
        assert streamed == (None, ['{"a": "1"}', '{"a": "and so'], "length")
        assert _streamed(ONE + CUT[:30], "length", size) == (None, ['{"a": "1"}'], "length")


def test_a_stop_string_in_arguments_is_the_same_whole_and_streamed():
    """The call has what came before the stop string, and the finish reason is not `tool_calls`."""
    for size in (1, 5, 1000):
        assert (
            _streamed(CUT, "stop", size) == _whole(CUT, "stop") == (None, ['{"a": "and so'], "stop")
        )


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        (r'{"a": "\ud800"}', r'{"a": "\ud800"}'),
        (r'"{\"a\": \"\ud800\"}"', r'{"a": "\ud800"}'),
        ('{"a": NaN, "b": [1e999, -Infinity]}', '{"a": "NaN", "b": ["1e999", "-Infinity"]}'),
        ('{"a": "</tool_call>"}', '{"a": "</tool_call>"}'),
        ("null", "{}"),
    ],
)
def test_arguments_are_json_that_every_client_reads(arguments, right):
    """RFC 8259 has no NaN and no Infinity; half of a surrogate pair is only sent as an escape."""
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    for answer in (_whole(text, "stop"), _streamed(text, "stop", 1)):
        assert answer == (None, [right], "tool_calls")
        answer[1][0].encode()


def test_a_name_that_cannot_be_sent_is_no_call():
    """Half of a surrogate pair in a name leaves the text as it is."""
    text = r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>'
    assert _whole(text, "stop") == (text, [], "stop")


def test_ids_are_those_that_the_template_takes():
    """Mistral's templates refuse ids that are not nine letters and digits.

    As mistral-common 1.11.7's `tests/data/chat_templates/v11.jinja` does.
    """
    checked = (
        "{% if tools %}{% endif %}[TOOL_CALLS]{% for m in messages %}"
        "{% for id in [m.tool_call_id] if id is defined %}"
        "{% if id | length != 9 %}{{ raise_exception('id') }}{% endif %}={{ id }}{% endfor %}"
        "{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}{% endfor %}"
    )
    called, _, answered = _prompt("{}", TOOLS, chat_template=checked).rpartition("=")
    assert called.endswith(answered) and len(answered) == 9 and answered.isalnum()

    tokenizer = byte_level(chat_template=checked)
    given = Tools([Tool.model_validate(tool) for tool in TOOLS], None, None, tokenizer)
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}]'
    (made,) = whole(given.reader().push(text, "stop")).tool_calls or []
    message = {"role": "tool", "content": "7", "tool_call_id": made.id}
    assert given.as_said([message]) == [message] and len(made.id) == 9


def test_calls_that_a_template_leaves_out_become_text():
    """DeepSeek R1's template writes the calls of a message without content only.

    As llama.cpp's `deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja` has it.
    """
    left_out = (
        "{% if tools %}{% endif %}<tool_call>{% for m in messages %}"
        "{% if m.role == 'assistant' and m.content is none %}{{ m.tool_calls }}{% endif %}"
        "{{ m.role }}:{{ m.content }};{% endfor %}"
    )
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert _prompt('{"a": 1}', TOOLS, chat_template=left_out) == (
        f"<tool_call>user:q;assistant:{call};user:<tool_response>7</tool_response>;"
    )


def test_a_template_without_a_system_has_the_tools_in_the_first_message():
    """Gemma 2's raises for a system's message, and where users and models do not take turns.

    As the `tokenizer_config.json` of google/gemma-2-2b-it does; Gemma 3's has a system's message
    in the first one of the user.
    """
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('take turns') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    tokenizer = byte_level(chat_template=template)
    given = Tools([Tool.model_validate(tool) for tool in TOOLS], None, None, tokenizer)
    calls = [
        {"id": f"{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for i in range(2)
    ]
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": f"r{i}", "tool_call_id": f"{i}"} for i in range(2)),
    ]
    prompt = tokenizer.decode(given.prompt(chat), False)
    assert prompt.startswith("[user]You can call functions.")
    call = '{"name": "f", "arguments": {}}'
    assert prompt.endswith(
        f"\n\nq[assistant]<tool_call>[{call}, {call}]</tool_call>"
        "[user]<tool_response>r0</tool_response>\n<tool_response>r1</tool_response>"
    )
