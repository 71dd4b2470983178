"""A span of OpenTelemetry for each request that generates. Import it only with the extra `otel`."""

from __future__ import annotations

from typing import final

from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve import __version__
from jaxserve.server.tracing import RequestTrace, current

# `gen_ai.operation.name` of the endpoints that generate.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/inference/v1/generate": "text_completion",
}


def provider_of(exporter: SpanExporter) -> TracerProvider:
    """Return a provider that exports ended spans on a thread of its own.

    They are flushed when the process ends, or by `shutdown`.
    """
    provider = TracerProvider(resource=Resource.create({"service.name": "jaxserve"}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


@final
class Tracing:
    """Records a span for each request that generates, as a child of its `traceparent`."""

    def __init__(self, app: ASGIApp, provider: TracerProvider, model: str):
        self._app = app
        self._tracer = provider.get_tracer("jaxserve", __version__)
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = _OPERATIONS.get(scope["path"]) if scope["type"] == "http" else None
        if operation is None:
            await self._app(scope, receive, send)
            return
        trace, status = RequestTrace(), 0
        fixed = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "jaxserve",
            **_models(self._model),
            "http.request.method": scope["method"],
            "url.path": scope["path"],
        }

        async def send_and_see(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self._tracer.start_as_current_span(
            f"{operation} {self._model}",
            context=extract(dict(Headers(scope=scope))),
            kind=SpanKind.SERVER,
            attributes=fixed,
        ) as span:
            token = current.set(trace)
            try:
                await self._app(scope, receive, send_and_see)
            finally:
                current.reset(token)
                span.set_attributes(trace.attributes)
                if trace.model is not None:
                    span.update_name(f"{operation} {trace.model}")
                    span.set_attributes(_models(trace.model))
                error = trace.error or (str(status) if status >= 400 else None)
                if status:
                    span.set_attribute("http.response.status_code", status)
                if error is not None:
                    span.set_attribute("error.type", error)
                if trace.error is not None or status >= 500:
                    span.set_status(StatusCode.ERROR)


def _models(name: str) -> dict[str, str]:
    return {"gen_ai.request.model": name, "gen_ai.response.model": name}
