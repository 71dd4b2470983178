"""What a model thinks, in the forms of chats and responses, and the template's variables."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.core.errors import InvalidSamplingParamsError
from jaxserve.core.request import Completion, Sample, Timing, TokenLogprob
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece
from jaxserve.server.errors import RefusedError
from jaxserve.server.events import LengthComments
from jaxserve.server.routes.chat import ChatAnswer, ChatChunks, ChatRequest
from jaxserve.server.routes.responses import (
    ResponseAnswer,
    ResponseEvents,
    ResponseRequest,
    template_messages,
)
from jaxserve.server.schema import as_template_message
from jaxserve.server.thinking import template_variables
from jaxserve.server.tools import Tools
from tests.common.vocabularies import byte_level

pytestmark = pytest.mark.fast

PIECES = [
    Piece(text="", token_ids=(1,), reasoning="", num_reasoning=1),
    Piece(text="", token_ids=(2,), reasoning="hm", num_reasoning=1),
    Piece(text="o", token_ids=(3, 4), reasoning=" so", num_reasoning=1),
    Piece(text="k", token_ids=(5,), finish_reason="stop"),
]
COMPLETION = Completion(
    request_id="a",
    prompt_token_ids=(1, 2),
    samples=(
        Sample(
            text="ok",
            token_ids=(1, 2, 3, 4, 5),
            finish_reason="stop",
            reasoning="hm so",
            num_reasoning_tokens=3,
        ),
    ),
    timing=Timing(arrival_s=0.0),
)
_TWO_EFFORTS = "{% if reasoning_effort not in ['none', 'high'] %}{% endif %}"
_EACH = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}:{{ m.content }};{% endfor %}"


def _chat(tools: Any = None) -> ChatAnswer:
    asked = {
        "messages": [{"role": "user", "content": "q"}],
        "stream_options": {"include_usage": True},
    }
    body = ChatRequest.model_validate({**asked, **({"tools": tools} if tools else {})})
    tokenizer = byte_level(chat_template=_EACH)
    given = Tools(body.tools, None, None, tokenizer)
    return ChatAnswer(body, SamplingParams(), given, "m")


def _data(events: bytes) -> list[dict[str, Any]]:
    lines = events.decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
def test_a_chat_has_its_reasoning_beside_the_content(tools):
    """Under both names, whole and in deltas before the content; usage has its tokens."""
    reply = json.loads(_chat(tools).reply(COMPLETION).model_dump_json())
    message = reply["choices"][0]["message"]
    assert message["content"] == "ok"
    assert message["reasoning_content"] == message["reasoning"] == "hm so"
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}

    answer = _chat(tools)
    events = ChatChunks(answer, LengthComments(None, None), None, lambda: 2)
    chunks = _data(b"".join(events.of([(0, piece)]) for piece in PIECES) + events.end())
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(delta.get(name, "") for delta in deltas) == "hm so"
    assert "".join(delta.get("content") or "" for delta in deltas) == "ok"
    order = [next(iter(delta)) for delta in deltas if delta.get("content") or "reasoning" in delta]
    assert order == ["reasoning_content"] * 2 + ["content"] * 2
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


@pytest.mark.parametrize("separates", [True, False])
def test_scores_are_those_of_the_content(separates):
    """Not of the thinking and the white space after it, whole and streamed.

    OpenAI's `logprobs.content` belongs to the content; vLLM's and sglang's has every token.
    """
    tokenizer = byte_level(chat_template="<think></think>")
    tokens = [*tokenizer.encode("hm", False), *tokenizer.encode("\n", False)]
    num_thinking = len(tokens) - 1
    tokens += tokenizer.encode("ok \n", False)
    scores = [
        TokenLogprob(token_id=token, logprob=-1.0, processed_logprob=-1.0) for token in tokens
    ]
    params = SamplingParams(logprobs=0, separate_reasoning=separates)
    body = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "q"}], "logprobs": True}
    )

    def answer() -> ChatAnswer:
        return ChatAnswer(body, params, Tools(None, None, None, tokenizer), "m")

    sample = Sample(
        text="ok \n",
        token_ids=tuple(tokens),
        finish_reason="stop",
        logprobs=tuple(scores),
        reasoning="hm" if separates else None,
        num_reasoning_tokens=num_thinking if separates else 0,
    )
    reply = answer().reply(replace(COMPLETION, samples=(sample,)))
    wanted = "ok \n" if separates else "hm\nok \n"
    assert reply.choices[0].logprobs is not None
    assert "".join(each.token for each in reply.choices[0].logprobs.content) == wanted

    events = ChatChunks(answer(), LengthComments(None, None), None, lambda: 2)
    given = b""
    for i, (token, score) in enumerate(zip(tokens, scores, strict=True)):
        # The first token of thinking is known to be one with the second.
        known = (0 if i == 0 else 2 if i == 1 else 1) if separates and i < num_thinking else 0
        text = tokenizer.decode([token]) if i > num_thinking or not separates else ""
        piece = Piece(
            text=text,
            token_ids=(token,),
            logprobs=(score,),
            num_reasoning=known,
            reasoning="hm" if known else "",
        )
        given += events.of([(0, piece)])
    given += events.of([(0, Piece(text="", token_ids=(), logprobs=(), finish_reason="stop"))])
    choices = [choice for chunk in _data(given) for choice in chunk["choices"]]
    found = [(choice["delta"], choice["logprobs"]) for choice in choices if choice["logprobs"]]
    assert "".join(each["token"] for _, logprobs in found for each in logprobs["content"]) == wanted
    assert not any("reasoning" in delta for delta, _ in found)


def _response() -> ResponseAnswer:
    body = ResponseRequest.model_validate({"input": "q"})
    tokenizer = byte_level(chat_template=_EACH)
    return ResponseAnswer(body, SamplingParams(), Tools(None, None, None, tokenizer), "m")


def test_a_response_has_an_item_of_its_reasoning():
    """Its events and fields are those of openai 3.57, in whose types they are read here."""
    from openai.types.responses import ResponseOutputItem, ResponseStreamEvent
    from pydantic import TypeAdapter

    whole = _response().reply(COMPLETION).model_dump()
    thought, said = map(TypeAdapter(ResponseOutputItem).validate_python, whole["output"])
    assert (thought.type, said.type) == ("reasoning", "message")
    assert thought.content[0].text == "hm so" and said.content[0].text == "ok"
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}

    events = ResponseEvents(_response(), LengthComments(None, None), lambda: 2)
    given = events.begin() + b"".join(events.of([(0, piece)]) for piece in PIECES) + events.end()
    *events, ended = _data(given)[2:]
    read = [TypeAdapter(ResponseStreamEvent).validate_python(each) for each in events]
    assert [(event.type, event.output_index) for event in read] == [
        ("response.output_item.added", 0),
        ("response.content_part.added", 0),
        ("response.reasoning_text.delta", 0),
        ("response.reasoning_text.delta", 0),
        ("response.reasoning_text.done", 0),
        ("response.content_part.done", 0),
        ("response.output_item.done", 0),
        ("response.output_item.added", 1),
        ("response.content_part.added", 1),
        ("response.output_text.delta", 1),
        ("response.output_text.delta", 1),
        ("response.output_text.done", 1),
        ("response.content_part.done", 1),
        ("response.output_item.done", 1),
    ]
    output = ended["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert ended["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_in_the_history_reaches_the_template(name):
    """Under each of the names that clients have; a response's items belong to the next answer."""
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", name: "hm"}]
    body = ChatRequest.model_validate({"messages": said})
    tokenizer = byte_level(chat_template=_EACH)
    tools = Tools(None, None, None, tokenizer)
    prompt = tools.prompt([as_template_message(message) for message in body.messages])
    assert tokenizer.decode(prompt, False) == "user::q;assistant:hm:a;"

    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "status": "completed"}
    thought["content"] = [{"type": "reasoning_text", "text": "hm"}]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    given = ResponseRequest.model_validate(
        {
            "input": [
                thought,
                call,
                {**thought, "content": None},
                {"role": "assistant", "content": "a"},
            ]
        }
    )
    read = template_messages(given.input)
    assert [message.get("reasoning_content") for message in read] == ["hm", None]
    assert read[0]["tool_calls"][0]["id"] == "c"


@pytest.mark.parametrize(
    ("template", "asked", "found"),
    [
        ("{{ enable_thinking }}", {"effort": "none"}, {"enable_thinking": False}),
        ("{{ enable_thinking }}", {"effort": "low"}, {"enable_thinking": True}),
        ("{{ thinking }}", {"enable_thinking": True}, {"thinking": True}),
        ("{{ reasoning_effort }}", {"effort": "high"}, {"reasoning_effort": "high"}),
        # mistral-common 1.11.7's v15.jinja raises for any other effort.
        (_TWO_EFFORTS, {"effort": "low"}, {"reasoning_effort": "high"}),
        (_TWO_EFFORTS, {"effort": "none"}, {"reasoning_effort": "none"}),
        ("{{ messages }}", {"effort": "high", "enable_thinking": False}, {}),
        (
            "{{ enable_thinking }}",
            {"effort": "low", "given": {"enable_thinking": False, "x": 1}},
            {"enable_thinking": False, "x": 1},
        ),
        ("{{ x }}", {"defaults": {"x": 1, "y": 2}, "given": {"x": 3}}, {"x": 3, "y": 2}),
    ],
)
def test_variables_are_those_that_the_template_reads(template, asked, found):
    """Given ones count before effort and switch, and these before the server's."""
    tokenizer = byte_level(chat_template=template)
    given = {"defaults": {}, "given": None, **asked}
    assert template_variables(tokenizer, **given) == found


@pytest.mark.parametrize("name", ["messages", "tools", "a b"])
def test_variables_with_other_names_are_refused(name):
    tokenizer = byte_level(chat_template=_EACH)
    with pytest.raises(RefusedError, match="template_kwargs has the name"):
        template_variables(tokenizer, {}, {name: 1})
    with pytest.raises(InvalidSamplingParamsError, match="template_kwargs has the name"):
        SamplingParams(template_kwargs={name: 1})


@pytest.mark.parametrize(
    "bad",
    [
        {"template_kwargs": 3},
        {"template_kwargs": {"a": {1, 2}}},
        {"max_thinking_tokens": -1},
        {"separate_reasoning": "yes"},
    ],
)
def test_bad_values_are_refused(bad):
    (name,) = bad
    with pytest.raises(InvalidSamplingParamsError, match=name):
        SamplingParams(**bad)


def test_a_budget_has_two_names():
    """Both may be given if they agree."""
    said = {"messages": [{"role": "user", "content": "q"}]}
    for given in ({"max_thinking_tokens": 5}, {"thinking_token_budget": 5}):
        body = ChatRequest.model_validate({**said, **given})
        assert body.thinking_params == {"separate_reasoning": True, "max_thinking_tokens": 5}
    both = {**said, "max_thinking_tokens": 5, "thinking_token_budget": 6}
    with pytest.raises(RefusedError, match="contradict"):
        _ = ChatRequest.model_validate(both).thinking_params
