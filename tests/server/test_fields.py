"""What becomes of the fields that clients of OpenAI's API send: none is unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types.chat import ParsedChatCompletionMessage
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.responses import ParsedResponseFunctionToolCall, ParsedResponseOutputMessage
from openai.types.responses.response_create_params import (
    ResponseCreateParamsBase as ResponseParams,
)
from openai.types.responses.response_includable import ResponseIncludable
from pydantic import ValidationError

from jaxserve.server.backend import Backend
from jaxserve.server.errors import RefusedError
from jaxserve.server.options import ServerOptions
from jaxserve.server.routes.chat import ChatRequest
from jaxserve.server.routes.common import check_fields
from jaxserve.server.routes.completions import CompletionRequest
from jaxserve.server.routes.responses import ResponseRequest
from jaxserve.server.schema import Ignored, Strict, as_template_message

pytestmark = pytest.mark.fast

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
# What agents and SDKs send unasked.
OF_CHATS: dict[str, Any] = {
    "metadata": {"thread": "1"},
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_key": "key",
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
    "prompt_cache_retention": "24h",
    "service_tier": "flex",
    "store": True,
    "stream_options": {"include_obfuscation": True, "continuous_usage_stats": True},
    "verbosity": "low",
}
OF_RESPONSES: dict[str, Any] = {
    "include": ["reasoning.encrypted_content"],
    "max_tool_calls": 3,
    "prompt_cache_key": "key",
    "prompt_cache_retention": "24h",
    "reasoning": {"summary": "auto"},
    "service_tier": "priority",
    "store": True,
    "stream_options": {"include_obfuscation": True},
    "text": {"verbosity": "low"},
    "truncation": "auto",
}
HONOURED: dict[str, Any] = {"service_tier": "auto", "store": False, "user": "me"}


def _names(fields: dict[str, Any]) -> set[str]:
    """Return the names of fields, those of options with a dot."""
    return {
        f"{name}.{inner}" if name in ("reasoning", "stream_options", "text") else name
        for name, value in fields.items()
        for inner in (value if isinstance(value, dict) else [""])
    }


@pytest.mark.parametrize(
    ("kind", "params"),
    [(ChatRequest, ChatParams), (CompletionRequest, CompletionParams)]
    + [(ResponseRequest, ResponseParams)],
)
def test_every_field_of_openais_client_is_known(kind: type[Strict], params: Any):
    """Its own package says which ones there are."""
    assert not get_type_hints(params).keys() - kind.model_fields.keys() - {"stream"}


@pytest.mark.parametrize(
    ("kind", "least", "fields"),
    [(ChatRequest, CHAT, OF_CHATS), (ResponseRequest, {"input": "hi"}, OF_RESPONSES)],
)
def test_fields_without_effect_are_accepted_or_refused(
    kind: type[Any], least: dict[str, Any], fields: dict[str, Any]
):
    """A strict server refuses them by name; what an answer keeps is not among them."""
    body = kind.model_validate({**least, **fields})
    assert set(body.ignored()) == _names(fields)
    assert not list(kind.model_validate({**least, **HONOURED}).ignored())
    lenient, strict = (
        Backend(ServerOptions(model_name="m", strict_fields=is_strict)) for is_strict in (0, 1)
    )
    check_fields(body, lenient)
    with pytest.raises(RefusedError, match=min(_names(fields))):
        check_fields(body, strict)
    check_fields(kind.model_validate({**least, **HONOURED}), strict)


def test_the_page_about_serving_names_them():
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    kinds = (ChatRequest, CompletionRequest, ResponseRequest)
    names = {
        name
        for kind in kinds
        for name, field in kind.model_fields.items()
        if any(isinstance(mark, Ignored) for mark in field.metadata)
    }
    names |= _names(OF_CHATS) | _names(OF_RESPONSES)
    assert not [name for name in names if f"`{name}`" not in page]


def test_responses_know_what_openais_client_lets_them_include():
    for name in ResponseIncludable.__args__:
        assert ResponseRequest.model_validate({"input": "a", "include": [name]}).include == [name]


@pytest.mark.parametrize(
    "fields",
    [
        {"moderation": {"model": "m"}},
        {"functions": [{"name": "f"}]},
        {"web_search_options": {}},
        {"modalities": ["text", "audio"]},
        {"enable_magic": True},
    ],
)
def test_what_would_change_an_answer_is_refused(fields: dict[str, Any]):
    """So is a name that no list has: it may be the one that matters."""
    with pytest.raises(ValidationError):
        ChatRequest.model_validate({**CHAT, **fields})


def test_messages_of_openais_helpers_go_back():
    """`parse` and the stream helper add fields, which a template does not see."""
    function = {"name": "f", "arguments": '{"x": 1}'}
    call = {"id": "c1", "type": "function", "function": function}
    parsed = ParsedChatCompletionMessage[Any].model_validate(
        {
            "role": "assistant",
            "content": '{"a": 1}',
            "parsed": {"a": 1},
            "tool_calls": [
                {**call, "index": 0, "function": {**function, "parsed_arguments": {"x": 1}}}
            ],
        }
    )
    for given in (parsed.model_dump(), parsed.to_dict()):
        body = ChatRequest.model_validate({"messages": [{**given, "annotations": []}]})
        (found,) = map(as_template_message, body.messages)
        assert found == {"role": "assistant", "content": '{"a": 1}', "tool_calls": [call]}
    empty = {"role": "assistant", "content": "a", "tool_calls": []}
    body = ChatRequest.model_validate({"messages": [empty], "tools": []})
    assert as_template_message(body.messages[0]) == {"role": "assistant", "content": "a"}
    assert body.tools is None


def test_items_of_openais_helpers_go_back():
    text = {"type": "output_text", "text": "a", "annotations": [], "parsed": {"a": 1}}
    items = [
        ParsedResponseOutputMessage[Any]
        .model_validate(
            {
                "type": "message",
                "id": "m",
                "role": "assistant",
                "status": "completed",
                "content": [text],
            }
        )
        .model_dump(),
        ParsedResponseFunctionToolCall.model_validate(
            {
                "type": "function_call",
                "call_id": "c",
                "name": "f",
                "arguments": "{}",
                "parsed_arguments": {},
            }
        ).model_dump(),
    ]
    body = ResponseRequest.model_validate({"input": items})
    assert [item.type for item in body.input] == ["message", "function_call"]


def test_marks_of_caches_are_not_shown_to_templates():
    """Agents mark parts and tools for Anthropic's cache, and OpenAI's client for its own."""
    part = {"type": "text", "text": "hi", "prompt_cache_breakpoint": {"mode": "explicit"}}
    tool = {"type": "function", "function": {"name": "f"}, "cache_control": {"type": "ephemeral"}}
    said = {"role": "user", "content": [{**part, "cache_control": {"type": "ephemeral"}}]}
    body = ChatRequest.model_validate({"messages": [said], "tools": [tool]})
    assert as_template_message(body.messages[0]) == {"role": "user", "content": "hi"}
    assert body.tools is not None
    assert body.tools[0].model_dump(exclude_none=True) == {
        "type": "function",
        "function": {"name": "f"},
    }
