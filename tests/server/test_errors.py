"""Errors as the official client's classes, and the table of statuses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
import tokenizers
from pydantic import BaseModel, ValidationError

from jaxserve.core import errors
from jaxserve.core.sampling_params import MAX_LOGIT_BIAS
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.scheduling.order import Priority
from jaxserve.scheduling.presets import get_policy
from jaxserve.server.errors import STATUSES, headers_of, kind_of
from jaxserve.server.routes.chat import ChatRequest
from jaxserve.server.routes.completions import CompletionRequest
from jaxserve.server.routes.messages import MessagesRequest
from jaxserve.server.routes.responses import ResponseRequest
from jaxserve.server.routes.tokens import DetokenizeRequest, GenerateRequest, TokenizeRequest
from tests.common.tiers import some
from tests.server.serving import CHAT, NAME, client, metrics, post, runtime, server


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with runtime() as rt, server(rt, max_body_bytes=20_000, max_samples=8) as url:
        yield url


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        (
            {"max_tokens": -1},
            "max_tokens: Input should be greater than or equal to 1, and it is -1",
        ),
        ({"top_logprobs": 2}, "needs logprobs=true"),
        ({"stream_options": {"include_usage": True}}, "needs stream=true"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "contradict"),
        ({"n": 2, "temperature": 0}, "identical samples"),
        ({"n": 9}, "allows 8"),
        ({"logit_bias": {"x": 1}}, "not a token id"),
        ({"logit_bias": {"9" * 5000: 1}}, "not a token id"),
        ({"logit_bias": {"9999999999": 1}}, "outside the vocabulary"),
        ({"logit_bias": {"97": 1}}, "outside the vocabulary"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 65}, "stop: List should have at most 64 items"),
        ({"stop": ["a" * 257]}, "stop.0: String should have at most 256 characters"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens=9"),
        ({"stream": True, "prompt_logprobs": 1}, "cannot be streamed"),
        ({"audio": {"voice": "x", "format": "mp3"}}, "audio is not supported"),
        ({"service_tier": "best"}, "service_tier has to be 'auto', 'default', 'flex'"),
        ({"seed": 2**63}, "seed: Input should be less than or equal to 9223372036854775807"),
        ({"other": None}, "other is not supported"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "unknown", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type has to be 'text'",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id: Field"),
        ({"messages": [{"role": "user", "content": "x" * 200}]}, "the prompt has"),
    ],
)
def test_bad_requests_say_what_is_wrong(url: str, fields: dict[str, Any], said: str):
    """A field that cannot be honoured is a BadRequestError that names it."""
    with client(url) as ai, pytest.raises(openai.BadRequestError) as caught:
        ai.chat.completions.create(
            model=NAME, messages=fields.get("messages", CHAT), extra_body=fields
        )
    assert said in str(caught.value)
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("conversation", [{}, {"conversation_id": "refused"}])
def test_refused_requests_are_not_counted(url: str, conversation: dict[str, Any], stream: bool):
    """They are no ends of requests in the metrics, neither aborts nor errors, and none is open."""
    long = [{"role": "user", "content": "x" * 200}]
    body = {"messages": long, "max_tokens": 2, "stream": stream, **conversation}
    names = [f"jaxserve:request_success_total{[end]}" for end in ("abort", "error", "stop")]
    before = metrics(url)
    refused = post(url, "/v1/chat/completions", body)
    assert (refused.status_code, "the prompt has" in refused.text) == (400, True)
    after = metrics(url)
    assert [after[name] for name in names] == [before[name] for name in names]
    assert after["jaxserve:num_requests_waiting"] == 0


def test_unknown_model_and_path(url: str):
    with client(url) as ai, pytest.raises(openai.NotFoundError) as caught:
        ai.chat.completions.create(model="other", messages=CHAT)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    unknown = post(url, "/chat/completions", {}).json()["error"]
    assert unknown["type"] == "invalid_request_error" and "begin with /v1" in unknown["message"]
    wrong = post(url, "/health", {})
    assert wrong.status_code == 405
    assert wrong.json()["error"]["message"] == "/health does not take POST; send GET"


def test_cut_json_says_where(url: str):
    error = post(url, "/v1/completions", b'{"prompt": }').json()["error"]
    assert error["message"] == "the body is not JSON: Expecting value, at character 11"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"nul", b"\xff\xfe", b'{"messages": "\\ud800"}', b"[" * 10_000],
    ids=["empty", "cut", "list", "word", "utf8", "surrogate", "deep"],
)
def test_malformed_bodies_are_400(url: str, body: bytes):
    answer = post(url, "/v1/chat/completions", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/chat/completions", b"", "the body is empty; send a JSON object"),
        ("/v1/chat/completions", b'{"messages": "\xff"}', "not JSON in UTF-8"),
        ("/v1/completions", b'{"prompt": [1, -1]}', "prompt.1: Input should be greater"),
        ("/v1/completions", b'{"prompt": []}', "prompt: List should have at least 1 item"),
        ("/v1/completions", b'{"prompt": "a", "best_of": 2}', "best_of=2 is not supported"),
        ("/v1/completions", b'{"prompt": "a", "suffix": "b"}', "suffix is not supported"),
        (
            "/v1/responses",
            b'{"input": "a", "previous_response_id": "resp_1"}',
            "stores no responses; send what was said before in input, or pass a conversation",
        ),
        ("/v1/responses", b'{"input": []}', "input: List should have at least 1 item"),
        (
            "/v1/responses",
            b'{"input": "a", "tools": [{"type": "web_search"}]}',
            "tools.0.type has to be 'function'",
        ),
        (
            "/v1/responses",
            b'{"input": [{"type": "function_call_output", "call_id": "1", "output": 1}]}',
            "input.0.output: Input should be a valid string",
        ),
        ("/v1/responses", b'{"input": [{"type": "other"}]}', "input.0: Input tag 'other'"),
        ("/v1/responses", b'{"input": [1]}', "input.0: Input should be a valid dictionary"),
    ],
)
def test_errors_are_of_what_was_meant(url: str, path: str, body: bytes, said: str):
    """Where a value may have several types, the message is about the one that was given."""
    answer = post(url, path, body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


_MANY: dict[str, Any] = {str(number): 1 for number in range(10_000)}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [*[""] * 10_000, 1]}),
        (CompletionRequest, {"prompt": [*["a"] * 10_000, 1]}),
        (CompletionRequest, {"prompt": [["a"] * 10_000] * 2}),
        (CompletionRequest, {"prompt": [-1] * 10_000}),
        (ChatRequest, {"messages": [1] * 10_000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 10_000}]}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [1] * 10_000}]}),
        (ChatRequest, {"messages": CHAT, **_MANY}),
        (ChatRequest, {"messages": [{**CHAT[0], **_MANY}]}),
        (ChatRequest, {"messages": CHAT, "logit_bias": dict.fromkeys(_MANY, "a")}),
        (ChatRequest, {"messages": CHAT, "guided_json": {f"\ud800{i}": 1 for i in range(10_000)}}),
        (ChatRequest, {"messages": CHAT, "stop": [1] * 10_000}),
        (ChatRequest, {"messages": CHAT, "guided_choice": [1] * 10_000}),
        (ChatRequest, {"messages": CHAT, "structured_outputs": {"choice": [1] * 10_000}}),
        (MessagesRequest, {"messages": [1] * 10_000, "max_tokens": 1}),
        (MessagesRequest, {"messages": [{"role": "user", "content": [1] * 10_000}]}),
        (ResponseRequest, {"input": [1] * 10_000}),
        (ResponseRequest, {"input": [{"role": "user", "content": [1] * 10_000}]}),
        (
            ResponseRequest,
            {"input": [{"type": "function_call_output", "call_id": "1", "output": [1] * 10_000}]},
        ),
        (ResponseRequest, {"input": "a", "include": [1] * 10_000}),
        (ResponseRequest, {"input": "a", "metadata": _MANY}),
        (TokenizeRequest, {"messages": [1] * 10_000}),
        (DetokenizeRequest, {"tokens": ["a"] * 10_000}),
        (GenerateRequest, {"token_ids": ["a"] * 10_000}),
    ],
)
def test_errors_of_a_body_are_few(kind: type[BaseModel], body: dict[str, Any]):
    """A body with thousands of bad values is refused for the first ones, which takes no time."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= MAX_LOGIT_BIAS + 2


@pytest.mark.parametrize(
    ("body", "said"),
    some(
        [
            ({"prompt": [*[""] * 250_000, 1]}, "prompt.0: String should have at least 1 character"),
            (
                {"prompt": "a", **{f"x{i}": 1 for i in range(80_000)}},
                "the field x0 is not supported",
            ),
        ]
    ),
    ids=["prompts", "fields"],
)
def test_large_bad_bodies_are_refused_at_once(body: dict[str, Any], said: str):
    """A body of 1 MB with nothing but mistakes does not stop the server, which others use too."""
    with runtime() as rt, server(rt) as url:
        begun_s = time.monotonic()
        refused = post(url, "/v1/completions", body)
        assert time.monotonic() < begun_s + 5
        assert refused.status_code == 400 and said in refused.json()["error"]["message"]
        assert post(url, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_metadata_has_any_number_of_pairs(url: str):
    """It is checked in parts, and returned as a whole."""
    body = {"input": "a", "max_output_tokens": 1, "metadata": {str(i): "x" for i in range(300)}}
    assert post(url, "/v1/responses", body).json()["metadata"] == body["metadata"]
    refused = post(url, "/v1/responses", {**body, "metadata": {**body["metadata"], "last": 1}})
    assert "metadata.last: Input should be a valid string" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": CHAT, "service_tier": None, "functions": None, "audio": None},
        ),
        ("/v1/completions", {"prompt": "a", "best_of": None, "suffix": None}),
        ("/v1/completions", {"prompt": "a", "best_of": 1}),
        ("/v1/responses", {"input": "a", "previous_response_id": None, "reasoning": None}),
    ],
)
def test_null_asks_for_nothing(url: str, path: str, body: dict[str, Any]):
    """Clients that write all fields of OpenAI's API, unset ones as null, are answered."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    answer = post(url, path, {**body, limit: 2})
    assert answer.status_code == 200, answer.text


def test_too_many_samples_are_refused_before_prompts_are_tokenized():
    """Their number is told, although the tokenizer has no word for the prompts, and so raises."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="missing"))
    tokenizer = Tokenizer(words, eos_token_ids=())
    with runtime(tokenizer=tokenizer) as rt, server(rt, max_samples=8) as own:
        for path, body, count in (
            ("/v1/completions", {"prompt": ["b"] * 9}, 9),
            ("/v1/completions", {"prompt": ["b"] * 4, "n": 3}, 12),
            ("/inference/v1/generate", {"token_ids": [0], "sampling_params": {"n": 9}}, 9),
        ):
            refused = post(own, path, body)
            assert refused.status_code == 400, refused.text
            assert f"{count} samples were asked for" in refused.json()["error"]["message"]
        assert post(own, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_lone_surrogates_are_400(url: str):
    assert post(url, "/v1/completions", {"prompt": "\ud800"}).status_code == 400
    said = [{"role": "user", "content": "\ud800"}]
    assert post(url, "/v1/chat/completions", {"messages": said}).status_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "\ud800"},
        {"metadata": {"key": "\ud800"}},
        {"metadata": {"\ud800": "value"}},
        {"tools": [{"type": "function", "name": "f", "description": "\ud800"}]},
        {"text": {"format": {"type": "json_schema", "name": "\ud800", "schema": {}}}},
    ],
    ids=str,
)
def test_texts_that_an_answer_repeats_are_unicode(url: str, fields: dict[str, Any]):
    """One that is not is refused before anything is generated; it could not be returned."""
    answer = post(url, "/v1/responses", {"input": "a", "max_output_tokens": 1, **fields})
    assert answer.status_code == 400, answer.text
    assert "unicode" in answer.json()["error"]["message"]


def test_priority_needs_a_priority_order(url: str):
    """A priority is an error under a policy that does not heed it, and only there."""
    for path, body in (
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 1}}),
    ):
        refused = post(url, path, {**body, "priority": 2})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
        assert post(url, path, {**body, "priority": 0}).status_code == 200
    policy = replace(get_policy("vllm_like"), name="urgent", order=Priority())
    with runtime(policy=policy) as rt, server(rt) as own:
        body = {"prompt": "a", "max_tokens": 1, "priority": 2}
        assert post(own, "/v1/completions", body).status_code == 200


def _deep(depth: int) -> Any:
    return {} if depth == 0 else {"properties": _deep(depth - 1)}


# Values that Python's JSON reads, and that cannot be written again.
_ODD = {"surrogate": {"title": "\ud800"}, "nan": {"minimum": float("nan")}, "deep": _deep(300)}


@pytest.mark.parametrize("odd", _ODD)
@pytest.mark.parametrize("field", ["tools", "format", "guided_json", "structured_outputs"])
def test_schemas_that_are_not_json_are_400(url: str, field: str, odd: str):
    """A schema with a lone surrogate, without numbers, or nested too deeply is a bad request."""
    schema = _ODD[odd]
    function = {"name": "f", "parameters": schema}
    named = {"name": "n", "schema": schema}
    chat, responses = {
        "tools": (
            {"tools": [{"type": "function", "function": function}]},
            {"tools": [{"type": "function", **function}]},
        ),
        "format": (
            {"response_format": {"type": "json_schema", "json_schema": named}},
            {"text": {"format": {"type": "json_schema", **named}}},
        ),
        "guided_json": ({"guided_json": schema}, None),
        "structured_outputs": ({"structured_outputs": {"json": schema}}, None),
    }[field]
    answers = [post(url, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, **chat})]
    if responses is not None:
        answers.append(post(url, "/v1/responses", {"input": "a", **responses}))
    for answer in answers:
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"]


def test_odd_names_and_arguments_are_not_failures(url: str):
    """Neither a field whose name is not Unicode, nor such arguments of an earlier call, are 5xx."""
    refused = post(url, "/v1/chat/completions", {"messages": CHAT, "\ud800": 1})
    assert refused.status_code == 400, refused.text
    deep = '{"a":' * 300 + "1" + "}" * 300  # more tokens than the context has
    for arguments, status in ((r'{"a": "\ud800"}', 200), ('{"a": NaN}', 200), (deep, 400)):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        said = [*CHAT, {"role": "assistant", "tool_calls": [call]}]
        answer = post(url, "/v1/chat/completions", {"messages": said, "max_tokens": 2})
        assert answer.status_code == status, answer.text


def test_large_bodies_are_413(url: str):
    body = b'{"prompt": "' + b"x" * 30_000 + b'"}'
    for headers in ({}, {"transfer-encoding": "chunked"}):
        answer = post(url, "/v1/completions", body, **headers)
        assert answer.status_code == 413
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_every_error_has_a_status():
    """Every typed error of the library has an entry in the table, by itself or by a base."""
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.JaxserveError):
            found = next(STATUSES[base] for base in kind.__mro__ if base in STATUSES)
            # A bound may be kept, and a grammar compiled, when less is running.
            depends_on_load = kind in (errors.BoundNotMetError, errors.GrammarsBusyError)
            is_request = issubclass(kind, errors.InvalidRequestError) and not depends_on_load
            is_setting = issubclass(kind, errors.InvalidConfigError)
            assert (found.status == 400) == (is_request or is_setting), name


@pytest.mark.parametrize("kind", [errors.GrammarsBusyError, errors.QueueFullError])
def test_429_says_when_to_come_again(kind: type[errors.JaxserveError]):
    """A client that is one of too many is told to wait a second, where no estimate is known."""
    found = headers_of(kind("too many"))
    assert (found["retry-after"], found["x-should-retry"]) == ("1", "true")


def test_latency_bound(url: str):
    """A bound that cannot be met is 503, which may be retried; one that can be met is honoured."""
    asked: dict[str, Any] = {"prompt": "a", "max_tokens": 100, "temperature": 0}
    assert post(url, "/v1/completions", asked).status_code == 200  # the engine knows its steps now
    refused = post(url, "/v1/completions", {**asked, "latency_bound": 1e-6})
    assert (refused.status_code, refused.headers["x-should-retry"]) == (503, "true")
    assert refused.json()["error"]["code"] == "bound_not_met"
    assert post(url, "/v1/completions", {**asked, "latency_bound": 1000}).status_code == 200


def test_entry_of_the_nearest_base_counts():
    """A subclass without an entry is answered as its base."""
    error = errors.ConversationTooLongError("id", 1, 2, 3)
    assert kind_of(error).code == "context_length_exceeded"
    assert kind_of(errors.ModelCacheError("x")).status == 500
