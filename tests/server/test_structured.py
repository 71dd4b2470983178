"""Structured output and tools with the official client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx2
import openai
import pydantic
import pytest

from jaxserve.core.errors import GrammarFailedError
from jaxserve.server.routes.responses import OutputCall, OutputItems, ResponseEvent
from jaxserve.server.schema import AddedCall, AddedFunction, Tool
from jaxserve.server.tools import Tools
from jaxserve.testing import letter_tokenizer
from tests.common.schemas import SYMBOLS
from tests.common.tiers import some
from tests.server.serving import CHAT, NAME, chat_server, client, post

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "size": {"type": "integer", "maximum": 99}},
    "required": ["color"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"the {name}",
            "parameters": {
                "type": "object",
                "properties": {"place": {"enum": ["Rome", "Oslo"]}},
                "required": ["place"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "time")
]
_MESSAGES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.place }}{% endfor %}\n{% endfor %}"
)
# Beginnings of templates, by which the formats are told.
TEMPLATES = {
    "hermes": "{% if tools %}{{ tools | tojson }} in <tool_call>{% endif %}" + _MESSAGES,
    "mistral": "{% if tools %}{{ tools | tojson }} after [TOOL_CALLS]{% endif %}" + _MESSAGES,
    "llama3": '{% if tools %}{{ tools | tojson }} as "parameters"{% endif %}' + _MESSAGES,
    "list": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
}


def _serve(folder: Path, template: str) -> Iterator[openai.OpenAI]:
    with chat_server(folder, template) as url, client(url) as ai:
        yield ai


@pytest.fixture(scope="module", params=list(TEMPLATES))
def tooled(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[openai.OpenAI]:
    """Yield a client of a server whose model has the format of a family."""
    folder = tmp_path_factory.mktemp("models") / request.param
    yield from _serve(folder, TEMPLATES[request.param])


@pytest.fixture(scope="module")
def ai(tmp_path_factory: Any) -> Iterator[openai.OpenAI]:
    yield from _serve(tmp_path_factory.mktemp("models") / "plain", TEMPLATES["list"])


def _ask(ai: openai.OpenAI, **others: Any) -> Any:
    given = {"messages": CHAT, "max_completion_tokens": 200, "seed": 1, **others}
    return ai.chat.completions.create(model=NAME, **given)


def _streamed(ai: openai.OpenAI, **others: Any) -> Any:
    """Return the choice that the client accumulates from the stream of what `_ask` asks."""
    given: Any = {"messages": CHAT, "max_completion_tokens": 200, "seed": 1, **others}
    with ai.chat.completions.stream(model=NAME, **given) as stream:
        return stream.get_final_completion().choices[0]


def test_response_format_is_kept_streamed_or_not(ai: openai.OpenAI):
    """JSON of a schema, with and without `strict`; text is any."""
    for strict in (True, False):
        form: Any = {"name": "box", "schema": SCHEMA, "strict": strict}
        asked: Any = {"response_format": {"type": "json_schema", "json_schema": form}}
        answer = _ask(ai, **asked).choices[0]
        assert answer.finish_reason == "stop"
        assert json.loads(answer.message.content)["color"] in ("red", "blue")
        chunks = list(_ask(ai, **asked, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == answer.message.content
    free = _ask(ai, response_format={"type": "text"}, max_completion_tokens=5).choices[0]
    assert free.finish_reason == "length"


def test_any_json_object(ai: openai.OpenAI):
    answer = _ask(ai, response_format={"type": "json_object"}, max_completion_tokens=60).choices[0]
    assert answer.message.content.startswith("{")
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)


def test_models_of_pydantic_are_parsed(ai: openai.OpenAI):
    """The client's `parse` makes the schema, and an object from the answer."""

    class Box(pydantic.BaseModel):
        color: str = pydantic.Field(pattern="^[a-z]{3}$")
        is_open: bool

    parsed = ai.chat.completions.parse(
        model=NAME, messages=CHAT, response_format=Box, max_completion_tokens=100
    )
    box = parsed.choices[0].message.parsed
    assert isinstance(box, Box) and len(box.color) == 3


def test_responses_have_a_text_format(ai: openai.OpenAI):
    """`text.format` of `/v1/responses` takes a schema, and says it again."""
    form: Any = {"type": "json_schema", "name": "box", "schema": SCHEMA, "strict": True}
    answer = ai.responses.create(model=NAME, input="hi", text={"format": form}, store=False)
    assert json.loads(answer.output_text)["color"] in ("red", "blue")
    assert answer.text is not None and answer.text.format is not None
    assert answer.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "(" /[0-9]{2}/ ")"'}, r"\([0-9]{2}\)"),
        ({"guided_json": {"type": "integer", "minimum": 1, "maximum": 9}}, "[1-9]"),
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [b-c]'}}, "a[bc]"),
        ({"structured_outputs": {"json": {"const": "x"}}}, '"x"'),
        ({"structured_outputs": {"json_object": True}, "max_tokens": 4}, r"\{.*"),
    ],
)
def test_fields_of_vllm(ai: openai.OpenAI, fields: dict[str, Any], pattern: str):
    """Chats and completions take them, as extensions."""
    chat = _ask(ai, max_completion_tokens=openai.omit, extra_body={"max_tokens": 60, **fields})
    assert re.fullmatch(pattern, chat.choices[0].message.content)
    body = {"max_tokens": 60, **fields}
    text = ai.completions.create(model=NAME, prompt="x", extra_body=body).choices[0].text
    assert re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"guided_regex": "("}, "cannot be compiled"),
        ({"guided_json": {"type": "object", "not": {}}}, "cannot be compiled"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "pass one of"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "exclude each other"),
        ({"structured_outputs": {}}, "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        (
            {
                "guided_json": SCHEMA,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "integer"}},
                },
            },
            "guided_json and response_format both",
        ),
        (
            {"structured_outputs": {"json": SCHEMA}, "response_format": {"type": "json_object"}},
            "structured_outputs and response_format both",
        ),
        (
            {"guided_grammar": 'start: "a"', "tools": TOOLS, "tool_choice": "required"},
            "guided_grammar and tool_choice both",
        ),
        ({"skip_special_tokens": True, "tools": TOOLS}, "skip_special_tokens=true and tools"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "same name"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "names 'x'",
        ),
    ],
)
def test_bad_requests_say_what_is_wrong(ai: openai.OpenAI, fields: dict[str, Any], said: str):
    with pytest.raises(openai.BadRequestError, match=re.escape(said)):
        _ask(ai, extra_body=fields)


def test_a_grammar_that_explodes_fails_alone(ai: openai.OpenAI):
    """It is a BadRequestError, whether the answer is streamed or not, and others are answered."""
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            _ask(ai, stream=stream, extra_body={"guided_grammar": SYMBOLS})
        assert caught.value.code == "grammar_too_complex"
    assert _ask(ai, extra_body={"guided_choice": ["yes"]}).choices[0].message.content == "yes"


def test_required_tools_are_called(tooled: openai.OpenAI):
    """With "required" one or several are called, with one name only that one, streamed or not."""
    named: Any = {"type": "function", "function": {"name": "time"}}
    for choice in ("required", named):
        asked: Any = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        answer = _ask(tooled, **asked).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        (call,) = answer.message.tool_calls
        assert call.function.name in (("weather", "time") if choice == "required" else ("time",))
        assert json.loads(call.function.arguments)["place"] in ("Rome", "Oslo")
        final = _streamed(tooled, **asked)
        assert final.finish_reason == "tool_calls"
        streamed = final.message.tool_calls[0].function
        assert (streamed.name, streamed.arguments) == (call.function.name, call.function.arguments)
        assert len(call.id) > 8


def test_an_argument_may_hold_the_tag_that_ends_a_call(tooled: openai.OpenAI):
    """The call is the same streamed or whole, with each format."""
    schema = {"type": "object", "properties": {"x": {"const": "a </tool_call> b"}}}
    schema |= {"required": ["x"], "additionalProperties": False}
    tool: Any = {"type": "function", "function": {"name": "save", "parameters": schema}}
    asked: Any = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = _ask(tooled, **asked).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"x": "a </tool_call> b"}
    streamed = _streamed(tooled, **asked).message.tool_calls[0].function
    assert streamed.arguments == call.function.arguments


@pytest.mark.parametrize("calls", some([False, True], 1))
def test_a_chat_with_tools_is_counted_as_it_is_answered(tooled: openai.OpenAI, calls: bool):
    """`/tokenize` takes `tools`, as vLLM does, and has the prompt of the chat itself."""
    call = {"name": "time", "arguments": '{"place": "Oslo"}'}
    messages: Any = [*CHAT]
    if calls:
        made = [{"id": "c1", "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": None, "tool_calls": made})
        messages.append({"role": "tool", "tool_call_id": "c1", "content": "noon"})
    for more in ({}, {"tools": TOOLS}):
        asked = {"messages": messages, **more}
        url = str(tooled.base_url).removesuffix("/v1/")
        chat = {**asked, "max_tokens": 1, "return_token_ids": True}
        answer = post(url, "/v1/chat/completions", chat).json()
        assert post(url, "/tokenize", asked).json()["tokens"] == answer["prompt_token_ids"]


@pytest.mark.parametrize("stream", some([False, True], 1))
def test_conversations_have_tools(tooled: openai.OpenAI, stream: bool):
    """A turn may call; the next ones send the result only, with the tools or without."""
    url = str(tooled.base_url).removesuffix("/v1/")
    id = f"tools {stream}"
    common = {"conversation_id": id, "stream": stream, "temperature": 0}

    def say(*messages: dict[str, Any], **others: Any) -> str:
        body = {**common, "messages": messages, "max_tokens": 200, **others}
        answer = post(url, "/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.text

    required: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    told = say({"role": "user", "content": "hi"}, **required)
    (call_id,) = re.findall(r'"id":"(\w+)"', told)
    assert "tool_calls" in told
    result = {"role": "tool", "tool_call_id": call_id, "content": "sunny"}
    say(result, tools=TOOLS, max_tokens=3)
    say({"role": "user", "content": "so"}, max_tokens=3)
    # Other tools, so that the history is written again, and a turn that has to call one.
    told = say({"role": "user", "content": "so"}, **{**required, "tools": TOOLS[:1]})
    assert "weather" in told
    shown = httpx2.get(f"{url}/conversations/{id}").json()["messages"]
    assert len(shown) == 8 and "place" in shown[1]["content"]
    assert "sunny" in shown[2]["content"]
    assert not any(message["role"] == "system" for message in shown)


FLAT: Any = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]


def test_responses_have_tools(tooled: openai.OpenAI):
    """A call is an item of the output, streamed or not, and goes back with its result."""
    named: Any = {"type": "function", "name": "time"}
    common: Any = {"model": NAME, "input": "hi", "tools": FLAT, "temperature": 0}
    for choice in ("required", named):
        asked = {**common, "tool_choice": choice, "parallel_tool_calls": False}
        answer = tooled.responses.create(**asked)
        (call,) = answer.output
        assert call.type == "function_call" and call.status == answer.status == "completed"
        assert call.name in (("weather", "time") if choice == "required" else ("time",))
        assert json.loads(call.arguments)["place"] in ("Rome", "Oslo")
        assert answer.tools[0].type == "function" and not answer.parallel_tool_calls
        for _ in range(5):  # a busy machine may join all pieces of one answer
            chunks = list(tooled.responses.create(**asked, stream=True))
            deltas = [e.delta for e in chunks if e.type == "response.function_call_arguments.delta"]
            if len(deltas) > 1:
                break
        assert len(deltas) > 1 and "".join(deltas) == call.arguments
        kinds = [e.type for e in chunks if e.type != "response.function_call_arguments.delta"]
        assert kinds == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        last: Any = chunks[-1]
        assert last.response.output[0].arguments == call.arguments
        with tooled.responses.stream(**asked) as stream:
            final: Any = stream.get_final_response().output[0]
        assert (final.name, final.arguments) == (call.name, call.arguments)
    said: Any = [
        {"role": "user", "content": "hi"},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "noon"},
    ]
    goes_on: Any = {**common, "input": said, "max_output_tokens": 5}
    answer = tooled.responses.create(**goes_on)
    assert answer.status == "incomplete" and answer.output[0].type == "message"
    without = tooled.responses.create(**{**goes_on, "input": "hi"})
    assert answer.usage is not None and without.usage is not None
    assert answer.usage.input_tokens > without.usage.input_tokens


def test_responses_have_text_before_calls():
    """The text before a call is a message of its own, which ends when the call begins."""
    made = OutputItems(lambda kind, **fields: ResponseEvent(type=kind, sequence_number=0, **fields))
    function = AddedFunction(name="time", arguments="{}")
    added = AddedCall(index=0, id="call_1", type="function", function=function)
    events = [*made.text("Look", []), *made.call(added), *made.close("completed")]
    assert [(item.type, item.status) for item in made.items] == [
        ("message", "completed"),
        ("function_call", "completed"),
    ]
    assert [event.output_index for event in events] == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1]


def test_text_behind_a_call_is_a_message_of_its_own():
    """Whole or cut anywhere, a text has the same messages and calls, in the order of the text."""
    begin, end = '<tool_call>[{"name": "time", "arguments": ', "}]</tool_call>"
    text = f'Look:{begin}{{"place": "Oslo"}}{end}so'
    cuts = [len(text), *range(len(text))]
    for cut in cuts:
        made = OutputItems(lambda kind, **fields: ResponseEvent(type=kind, sequence_number=0))
        tools = [Tool.model_validate(tool) for tool in TOOLS]
        tokenizer = letter_tokenizer()
        answered = Tools(tools, None, None, tokenizer).reader()
        for piece, reason in ((text[:cut], None), (text[cut:], "stop")):
            for part in answered.push(piece, reason):
                list(made.text(part, []) if isinstance(part, str) else made.call(part))
        list(made.close("completed"))
        before, call, behind = made.items
        assert isinstance(call, OutputCall) and call.arguments == '{"place": "Oslo"}', cut
        texts = [item.content[0].text for item in (before, behind) if item.type == "message"]
        assert texts == ["Look:", "so"], cut


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_the_arguments_of_a_forced_call_are_validated(choice: str):
    """A forced call that llguidance lets pass wrongly is an error; a free one is the client's."""
    tools = Tools([Tool.model_validate(tool) for tool in TOOLS], choice, None, letter_tokenizer())
    call = '<tool_call>[{"name": "time", "arguments": {"place": "%s"}}]</tool_call>'
    assert len(tools.reader().push(call % "Oslo", "stop")) == 2
    tools.reader().push((call % "Nowhere")[:60], "length")  # a call that was cut proves nothing
    if choice == "auto":
        tools.reader().push(call % "Nowhere", "stop")
        return
    answered = tools.reader()
    answered.push((call % "Nowhere")[:50], None)
    with pytest.raises(GrammarFailedError, match=r"'time' .*\$\.place: 'Nowhere' is not one of"):
        answered.push((call % "Nowhere")[50:], "stop")


def test_tools_of_nested_models_are_called(tooled: openai.OpenAI):
    """Each tool's references are its own, although two define the same name differently."""

    class Place(pydantic.BaseModel):
        city: Literal["Rome", "Oslo"]

    class Weather(pydantic.BaseModel):
        place: Place

    first = openai.pydantic_function_tool(Weather)
    second: Any = json.loads(json.dumps(first).replace("Rome", "Bern").replace("Oslo", "Bern"))
    second["function"]["name"] = "Other"
    tools = [first, second]
    names = ["Weather", "Other"]
    for name, cities in zip(names, (("Rome", "Oslo"), ("Bern",)), strict=True):
        choice: Any = {"type": "function", "function": {"name": name}}
        answer = _ask(tooled, tools=tools, tool_choice=choice).choices[0]
        assert (
            json.loads(answer.message.tool_calls[0].function.arguments)["place"]["city"] in cities
        )
    answer = _ask(tooled, tools=tools, tool_choice="required", max_completion_tokens=600).choices[0]
    assert answer.message.tool_calls[0].function.name in names


def test_a_call_or_an_answer_of_the_format(ai: openai.OpenAI):
    """With tools and a response format the model chooses, whole or streamed, or `tool_choice`."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    asked: Any = {"tools": TOOLS, "response_format": form}
    choice = _ask(ai, **asked).choices[0]
    streamed = _streamed(ai, **asked).message
    calls = choice.message.tool_calls or ()
    assert streamed.content == choice.message.content
    assert len(streamed.tool_calls or ()) == len(calls)
    if choice.finish_reason == "stop":
        assert json.loads(choice.message.content)["color"] in ("red", "blue")
    else:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert {json.loads(c.function.arguments)["place"] for c in calls} <= {"Rome", "Oslo"}
    must = _ask(ai, **asked, tool_choice="required").choices[0].message
    assert must.tool_calls and must.content is None
    never = _ask(ai, **asked, tool_choice="none").choices[0].message
    assert not never.tool_calls and json.loads(never.content)["color"] in ("red", "blue")


def test_tools_may_be_left_alone(tooled: openai.OpenAI):
    """With "auto", the default, text is text; with "none" the tools are not even offered."""
    short: Any = {"max_completion_tokens": 8, "temperature": 0, "tools": TOOLS}
    answer = _ask(tooled, **short)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.tool_calls is None
    without = _ask(tooled, **{**short, "tools": openai.omit})
    none = _ask(tooled, **short, tool_choice="none")
    assert none.usage.prompt_tokens == without.usage.prompt_tokens < answer.usage.prompt_tokens
    assert none.choices[0].message.content == without.choices[0].message.content


def test_calls_and_results_are_a_part_of_the_history(tooled: openai.OpenAI):
    """The answer's call goes back as it came, with the result, and the chat goes on."""
    call = _ask(tooled, tools=TOOLS, tool_choice="required").choices[0].message
    said: Any = [*CHAT, call.model_dump(exclude_none=True, exclude={"refusal"})]
    said += [
        {"role": "tool", "content": "sunny", "tool_call_id": each.id} for each in call.tool_calls
    ]
    answer = _ask(tooled, messages=said, tools=TOOLS, max_completion_tokens=5)
    assert answer.choices[0].finish_reason == "length"


def test_an_echoed_prompt_has_its_control_tokens(ai: openai.OpenAI):
    """Whole or streamed, as text or tokens, and the offsets are those of the whole text."""
    prompts: list[Any] = ["ab<end>c", [64, 65, 256]]
    asked: Any = {"model": NAME, "echo": True, "temperature": 0}
    for prompt in prompts:
        whole = ai.completions.create(prompt=prompt, logprobs=0, max_tokens=0, **asked)
        choice = whole.choices[0]
        assert "<end>" in choice.text and choice.text == "".join(choice.logprobs.tokens)
        assert choice.text[choice.logprobs.text_offset[2] :].startswith("<end>")
        pieces = ai.completions.create(prompt=prompt, stream=True, max_tokens=1, **asked)
        assert next(iter(pieces)).choices[0].text == choice.text


def test_calls_are_found_without_a_grammar_of_theirs(ai: openai.OpenAI):
    """With "auto" a call that the model writes is one, with the text before it as content."""
    written = 'Look: <tool_call>[{"name": "time", "arguments": {"place": "Oslo"}}]</tool_call>'
    fields = {"guided_choice": [written]}
    answer = _ask(ai, tools=TOOLS, extra_body=fields).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("Look:", "tool_calls")
    assert answer.message.tool_calls[0].function.name == "time"


def test_one_call_where_several_are_not_allowed(ai: openai.OpenAI):
    """With "auto" too, `parallel_tool_calls=False` lets the first call through only."""
    one = '{"name": "time", "arguments": {"place": "Oslo"}}'
    fields = {"guided_choice": [f"<tool_call>[{one}, {one}]</tool_call>"]}
    for several, num_calls in ((True, 2), (False, 1)):
        asked: Any = {"tools": TOOLS, "parallel_tool_calls": several, "extra_body": fields}
        answer = _ask(ai, **asked).choices[0]
        assert len(answer.message.tool_calls) == num_calls
        assert answer.finish_reason == "tool_calls"
        chunks = [chunk.choices[0].delta for chunk in _ask(ai, **asked, stream=True)]
        calls = [call for delta in chunks for call in delta.tool_calls or ()]
        assert sum(call.id is not None for call in calls) == num_calls


@pytest.mark.parametrize(
    ("before", "name"), [("", "time"), ("Look: \n", "time"), ("\n ", "other"), ("Look:\n", "other")]
)
def test_deltas_are_accumulated_as_openai_documents(ai: openai.OpenAI, before: str, name: str):
    """Clients that keep a call's first part, and then add its arguments, have the calls.

    The white space before a call is in no delta, no delta is empty, and content is null where a
    call begins the answer.
    """
    one = f'{{"name": "{name}", "arguments": {{"place": "Oslo"}}}}'
    fields = {"guided_choice": [f"{before}<tool_call>[{one}, {one}]</tool_call>"]}
    chunks = list(_ask(ai, tools=TOOLS, extra_body=fields, stream=True, n=2))
    for sample in range(2):
        choices = [c.choices[0] for c in chunks if c.choices[0].index == sample]
        calls: dict[int, Any] = {}
        arguments: dict[int, str] = {}
        for choice in choices:
            for call in choice.delta.tool_calls or ():
                if call.index not in calls:
                    assert (call.type, call.function.name) == ("function", name)
                    calls[call.index] = call
                    arguments[call.index] = call.function.arguments
                arguments[call.index] += call.function.arguments
        given = [json.loads(arguments[i]) for i in range(2)]
        assert given == [{"place": "Oslo"}] * 2 and calls[0].id != calls[1].id
        first, *others = [choice.delta for choice in choices]
        assert (first.role, first.content) == ("assistant", "" if before.strip() else None)
        content = "".join(delta.content or "" for delta in others)
        assert content == before.strip()
        assert all(each.content or each.tool_calls for each in others[:-1])
        assert choices[-1].finish_reason == "tool_calls"


def test_metrics_count_grammars(ai: openai.OpenAI):
    """The numbers of constrained requests and forced tokens, and the time of masks, are shown."""
    _ask(ai, extra_body={"guided_regex": "abc[de]f"})
    text = httpx2.get(str(ai.base_url).removesuffix("/v1/") + "/metrics").text
    for name in ("constrained_requests", "forced_tokens", "token_mask_seconds"):
        (line,) = re.findall(rf"^jaxserve:{name}_total{{.*}} (.*)$", text, re.MULTILINE)
        assert float(line) > 0
