"""`/v1/messages`, in the form of Anthropic's API: as the types of the package anthropic 2.14.0."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any, cast

import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import RuntimeClosedError
from jaxserve.server.events import EventStream, LengthComments
from jaxserve.server.exchange import Group
from jaxserve.server.routes.messages import (
    PING,
    MessagesAnswer,
    MessagesEvents,
    MessagesRequest,
    messages_of,
)
from jaxserve.server.tools import Tools
from tests.common.tiers import some
from tests.common.vocabularies import byte_level
from tests.server.serving import NAME, chat_server, post, server
from tests.server.test_structured import TEMPLATES
from tests.server.test_thinking import COMPLETION, PIECES

HI: Any = {"role": "user", "content": "hi"}
ASKED: Any = {"messages": [HI], "system": "short", "max_tokens": 9, "temperature": 0}
WEATHER: Any = {
    "name": "weather",
    "description": "the weather",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"enum": ["Rome", "Oslo"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}
CACHED: Any = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}


def _ask(url: str, **fields: Any) -> dict[str, Any]:
    answer = post(url, "/v1/messages", {**ASKED, "model": NAME, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def _events(url: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the data of a stream's events, whose names are their types."""
    answer = post(url, "/v1/messages", {**ASKED, "model": NAME, "stream": True, **fields})
    events = [each.split("\n") for each in answer.text.strip().split("\n\n")]
    named = [(a.removeprefix("event: "), json.loads(b.removeprefix("data: "))) for a, b in events]
    assert [name for name, _ in named] == [data["type"] for _, data in named]
    return [data for _, data in named]


def _built(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a stream, built as the package does."""
    first, *others = events
    message, texts = first["message"], []
    for event in others:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            texts[event["index"]] += event["delta"].get("text", event["delta"].get("partial_json"))
        elif event["type"] == "content_block_stop":
            block, text = message["content"][event["index"]], texts[event["index"]]
            is_text = block["type"] == "text"
            block.update({"text": text} if is_text else {"input": json.loads(text)})
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    assert others[-1] == {"type": "message_stop"}
    return message


def _num_prompt(message: dict[str, Any]) -> int:
    usage = message["usage"]
    assert min(usage.values()) >= 0, usage  # a grammar forces tokens, which may be cached, too
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.fixture(scope="module", params=some(TEMPLATES))
def tooled(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models") / request.param
    with chat_server(folder, TEMPLATES[request.param]) as url:
        yield url


def test_answer_is_the_runtimes(rt: Runtime, url: str):
    """The text is that of the same chat, and the reason says that the limit ended it."""
    chat = [{"role": "system", "content": "short"}, HI]
    expected = rt.generate(chat, SamplingParams(max_tokens=9))
    answer = _ask(url)
    assert answer.pop("id").startswith("msg")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": NAME,
        "content": [{"type": "text", "text": expected.text}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(expected.prompt_token_ids) % 8,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": len(expected.prompt_token_ids) // 8 * 8,
            "output_tokens": 9,
        },
    }


def test_events_build_the_answer(url: str):
    """They come in Anthropic's order, and make the same message as without a stream."""
    _ask(url)  # from here on, the prompt is cached
    events, whole = _events(url), _ask(url)
    kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    begun = events[0]["message"]
    assert (begun["content"], begun["stop_reason"], begun["usage"]["output_tokens"]) == (
        [],
        None,
        0,
    )
    assert begun["usage"]["input_tokens"] == _num_prompt(whole)
    assert {**_built(events), "id": ""} == {**whole, "id": ""}


@pytest.mark.parametrize("length", [1, 3])
def test_the_stop_sequence_is_named(url: str, length: int):
    """The text ends before it; of several, the one that came."""
    text = _ask(url)["content"][0]["text"]
    stop = text[4 : 4 + length]
    stops = ["\n\nHuman:", stop]
    answer = _ask(url, stop_sequences=stops)
    assert answer["content"] == [{"type": "text", "text": text[: text.index(stop)]}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert {**_built(_events(url, stop_sequences=stops)), "id": answer["id"]} == answer


def test_the_end_of_the_context_is_named(rt: Runtime, url: str):
    """It is another reason than the request's own limit."""
    answer = _ask(url, max_tokens=10_000)
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert sum(answer["usage"].values()) == 128


def test_tokens_are_counted_as_they_are_used(url: str, tooled: str):
    """`count_tokens` has the number that the answer says, with and without tools."""
    for address, fields in ((url, {}), (tooled, {"tools": [WEATHER]})):
        prompt = {"messages": [HI], "system": "short", "model": NAME, **fields}
        counted = post(address, "/v1/messages/count_tokens", prompt)
        used = _num_prompt(_ask(address, **fields, max_tokens=1))
        assert counted.json() == {"input_tokens": used}


def test_turns_as_templates_read_them():
    """Results are messages of their own; calls and thinking are of their answer.

    Turns of one role after another are one turn, as Anthropic says ("Consecutive `user` or
    `assistant` turns in your request will be combined into a single turn").
    """
    use = {"type": "tool_use", "id": "1", "name": "weather", "input": {"place": "Rom é"}}
    text = {"type": "text", "text": "so", **CACHED}
    body = {
        "system": [{"type": "text", "text": "be "}, {"type": "text", "text": "short", **CACHED}],
        "messages": [
            HI,
            {"role": "user", "content": [text, text]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {**text, "citations": None, "parsed_output": None},
                    {**use, "caller": {"type": "direct"}, "toolset_name": None},
                ],
            },
            {"role": "assistant", "content": [{**use, "id": "2"}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": [text], **CACHED},
                    {"type": "tool_result", "tool_use_id": "2", "is_error": True},
                    text,
                ],
            },
        ],
        "max_tokens": 1,
    }
    function = {"name": "weather", "arguments": '{"place": "Rom é"}'}
    calls = [{"id": id, "type": "function", "function": function} for id in "12"]
    assert messages_of(MessagesRequest.model_validate(body)) == [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "hi\n\nsoso"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "so", "tool_call_id": "1"},
        {"role": "tool", "content": "", "tool_call_id": "2"},
        {"role": "user", "content": "so"},
    ]


@pytest.mark.parametrize("is_shown", [True, False])
def test_thinking_is_a_block(is_shown: bool):
    """It comes before the text, whole and as events, with its tokens; `display` leaves it out."""
    display = {} if is_shown else {"display": "omitted"}
    thinking = {"type": "enabled", "budget_tokens": 1024, **display}
    body = MessagesRequest.model_validate({**ASKED, "thinking": thinking})
    tokenizer = byte_level(chat_template=TEMPLATES["list"])

    def answer() -> MessagesAnswer:
        tools = Tools(None, None, None, tokenizer)
        return MessagesAnswer(body, SamplingParams(max_tokens=9), tools, NAME)

    whole = answer().reply(COMPLETION).model_dump()
    thought = {"type": "thinking", "thinking": "hm so" if is_shown else "", "signature": ""}
    assert whole["content"] == [thought, {"type": "text", "text": "ok"}]
    assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": 3}
    events = MessagesEvents(answer(), LengthComments(None, None), lambda: 2)
    sent = events.begin() + b"".join(events.of([(0, piece)]) for piece in PIECES) + events.end()
    data = [json.loads(line[6:]) for line in sent.decode().split("\n") if line[:5] == "data:"]
    deltas = [each["delta"] for each in data if each["type"] == "content_block_delta"]
    thoughts = [{"type": "thinking_delta", "thinking": text} for text in ("hm", " so")]
    assert deltas == [
        *(thoughts if is_shown else []),
        {"type": "signature_delta", "signature": ""},
        *({"type": "text_delta", "text": text} for text in "ok"),
    ]
    assert data[-2]["usage"] == whole["usage"]


@pytest.mark.parametrize("choice", some([{"type": "any"}, {"type": "tool", "name": "weather"}]))
def test_calls_are_blocks(tooled: str, choice: dict[str, Any]):
    """A demanded call is a block of its own with valid input, which can be sent back."""
    one = {**choice, "disable_parallel_tool_use": True}
    fields: Any = {"tools": [WEATHER], "tool_choice": one, "max_tokens": 200}
    answer = _ask(tooled, **fields)
    (block,) = answer["content"]
    assert (block["type"], block["name"], answer["stop_reason"]) == (
        "tool_use",
        "weather",
        "tool_use",
    )
    assert block["input"]["place"] in ("Rome", "Oslo")
    built = _built(_events(tooled, **fields))
    (streamed,) = built["content"]
    assert {**streamed, "id": ""} == {**block, "id": ""}
    assert (built["stop_reason"], _num_prompt(built)) == ("tool_use", _num_prompt(answer))
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "7"}
    said = [
        HI,
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [result]},
    ]
    last = _ask(tooled, **{**fields, "messages": said, "tool_choice": {"type": "none"}})
    assert all(block["type"] == "text" for block in last["content"])


def test_the_answer_has_a_format(tooled: str):
    form = {"type": "json_schema", "schema": WEATHER["input_schema"]}
    (block,) = _ask(tooled, output_config={"format": form}, max_tokens=99)["content"]
    assert json.loads(block["text"])["place"] in ("Rome", "Oslo")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": 0}, "max_tokens: Input should be greater"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        (
            {"messages": [HI, {"role": "assistant", "content": "I"}]},
            "end with a message of the user",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "tag 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "tag 'document'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "to be 'custom'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "names 'x'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"other": 1}, "other is not supported"),
    ],
)
def test_bad_requests_have_the_form_of_the_api(url: str, fields: dict[str, Any], said: str):
    answer = post(url, "/v1/messages", {**ASKED, **fields})
    assert answer.status_code == 400
    error = answer.json().pop("error")
    assert answer.json()["type"] == "error"
    assert (error["type"], said in error["message"]) == ("invalid_request_error", True), error


def test_errors_by_status(rt: Runtime):
    """Also those that are answered before an endpoint is reached."""
    with server(rt, api_keys=("key",), max_body_bytes=1000) as url:

        def error(body: Any, path: str = "/v1/messages", **headers: str) -> tuple[int, str]:
            answer = post(url, path, body, **headers)
            assert answer.json().keys() == {"type", "error"}
            return answer.status_code, answer.json()["error"]["type"]

        key = {"x-api-key": "key"}
        assert error(ASKED) == error(ASKED, **{"x-api-key": "other"})
        assert error(ASKED) == (401, "authentication_error")
        assert error({**ASKED, "model": "other"}, **key) == (404, "not_found_error")
        assert error({}, "/v1/messages/batches", **key) == (404, "not_found_error")
        assert error({**ASKED, "system": "x" * 1000}, **key) == (413, "request_too_large")
        for headers in (key, {"authorization": "Bearer key"}):
            assert post(url, "/v1/messages", ASKED, **headers).status_code == 200


def test_a_stream_waits_with_pings_and_ends_with_an_error():
    """Each as an event of its type, the error in the form of the API."""

    async def groups() -> AsyncGenerator[Group]:
        yield []
        raise RuntimeClosedError("the server was stopped")

    class Nothing:
        def begin(self) -> bytes:
            return b""

        of = end = begin

    async def receive() -> Any:
        await asyncio.Event().wait()

    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    stream: Any = EventStream(
        groups(), cast(Any, Nothing()), lambda: None, b"", error_event="error", waiting=PING
    )
    asyncio.run(stream({"type": "http", "path": "/v1/messages"}, receive, send))
    ping, error = b"".join(sent).decode().strip().split("\n\n")
    assert ping == 'event: ping\ndata: {"type":"ping"}'
    name, data = error.split("\n")
    told = {"type": "overloaded_error", "message": "the server was stopped"}
    assert (name, json.loads(data[6:])) == ("event: error", {"type": "error", "error": told})
