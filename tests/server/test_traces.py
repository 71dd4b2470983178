"""Spans of OpenTelemetry, as the SDK's own exporter gets them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from jaxserve import Runtime, SamplingParams
from tests.common.tiers import some
from tests.common.waiting import until
from tests.server.serving import CHAT, NAME, post, runtime, server

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry.sdk.trace import TracerProvider  # noqa: E402  # after the check
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # noqa: E402
    InMemorySpanExporter,
)
from opentelemetry.trace import SpanKind, StatusCode  # noqa: E402

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 4, "top_p": 0.5},
    "/v1/completions": {"prompt": ["a", "bc"], "max_tokens": 4, "top_p": 0.5, "stop": ["zzz"]},
    "/v1/responses": {"input": "a", "max_output_tokens": 4, "top_p": 0.5},
    "/v1/messages": {"messages": CHAT, "max_tokens": 4, "top_p": 0.5},
    "/inference/v1/generate": {
        "token_ids": [1],
        "sampling_params": {"max_tokens": 4, "top_p": 0.5},
    },
}


@contextmanager
def _traced(rt: Runtime, **options: Any) -> Iterator[tuple[str, InMemorySpanExporter]]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with server(rt, traces=provider, **options) as url:
        yield url, exporter
    provider.shutdown()


@pytest.fixture
def served(rt: Runtime) -> Iterator[tuple[str, InMemorySpanExporter]]:
    with _traced(rt) as found:
        yield found


def _span(exporter: InMemorySpanExporter) -> Any:
    """Wait for the one span, which ends a moment after the client has the answer."""
    until(exporter.get_finished_spans)
    (span,) = exporter.get_finished_spans()
    return span


@pytest.mark.parametrize("stream", some([False, True], 1))
@pytest.mark.parametrize("path", BODIES)
def test_a_request_has_a_span(served: Any, path: str, stream: bool):
    """It says what was asked for and what came, below the caller's span."""
    url, exporter = served
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    told = post(
        url, path, {**BODIES[path], "stream": stream}, traceparent=f"00-{trace}-{parent}-01"
    )
    assert told.status_code == 200
    span = _span(exporter)
    assert f"{span.context.trace_id:032x}" == trace
    assert f"{span.parent.span_id:016x}" == parent
    chats = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
    operation = "chat" if path in chats else "text_completion"
    assert (span.name, span.kind) == (f"{operation} {NAME}", SpanKind.SERVER)
    found = dict(span.attributes)
    num_prompts = 2 if path == "/v1/completions" else 1
    wanted = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": NAME,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.usage.output_tokens": 4 * num_prompts,
        "gen_ai.response.finish_reasons": ("length",) * num_prompts,
        "http.response.status_code": 200,
    }
    assert wanted.items() <= found.items()
    assert found["gen_ai.usage.input_tokens"] >= num_prompts
    assert ("gen_ai.request.stop_sequences" in found) == (path == "/v1/completions")
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("stream", [False, True])
def test_turns_have_their_conversation(served: Any, stream: bool):
    url, exporter = served
    body = {**BODIES["/v1/chat/completions"], "conversation_id": "mine", "stream": stream}
    post(url, "/v1/chat/completions", body)
    span = _span(exporter)
    assert span.parent is None
    assert span.attributes["gen_ai.conversation.id"] == "mine"
    assert span.attributes["gen_ai.usage.output_tokens"] == 4


def test_refused_requests_have_their_status(served: Any):
    """A request that is refused says so; probes and lists have no span."""
    url, exporter = served
    assert post(url, "/v1/completions", {"prompt": "a", "top_p": 7}).status_code == 400
    assert post(url, "/tokenize", {"prompt": "a"}).status_code == 200
    span = _span(exporter)
    assert span.attributes["error.type"] == "400"
    assert span.attributes["http.response.status_code"] == 400


@pytest.mark.release
@pytest.mark.parametrize("conversation", some([{}, {"conversation_id": "adapted"}]))
def test_a_span_names_the_adapter(conversation: dict[str, Any]):
    with runtime(max_adapters=1, max_adapter_rank=1) as rt, _traced(rt) as (url, exporter):
        arrays = {name: np.zeros(shape, np.float32) for name, shape in rt.adapter_shapes(1).items()}
        rt.load_adapter("poems", arrays, scale=1.0)
        body = {**BODIES["/v1/chat/completions"], "model": "poems", **conversation}
        assert post(url, "/v1/chat/completions", body).status_code == 200
        span = _span(exporter)
    assert span.name == "chat poems"
    assert span.attributes["gen_ai.request.model"] == "poems"
    assert span.attributes["gen_ai.response.model"] == "poems"


@pytest.mark.release
@pytest.mark.parametrize(
    ("conversation", "error"),
    some([({}, "request_timeout"), ({"conversation_id": "late"}, "TurnTimeoutError")]),
)
def test_a_stream_that_times_out_is_an_error(conversation: dict[str, Any], error: str):
    """Its span says so, although its status was sent before."""
    with (
        runtime(step_s=0.05, max_decode_iterations=1) as rt,
        _traced(rt, request_timeout_s=1.5) as (url, exporter),
    ):
        rt.generate(CHAT, SamplingParams(max_tokens=3, temperature=1.0))  # compiles the steps
        body = {"messages": CHAT, "max_tokens": 100, "stream": True, **conversation}
        told = post(url, "/v1/chat/completions", body)
        assert told.status_code == 200 and "request_timeout" in told.text
        span = _span(exporter)
    assert span.attributes["http.response.status_code"] == 200
    assert span.attributes["error.type"] == error
    assert span.status.status_code is StatusCode.ERROR
