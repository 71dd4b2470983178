"""The ASGI application: endpoints, errors and the published schema.

FastAPI derives the OpenAPI document from the same types that check the requests.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from jaxserve import __version__
from jaxserve.core.errors import JaxserveError
from jaxserve.server.backend import Backend
from jaxserve.server.errors import Kind, RefusedError, invalid, kind_of, response_of
from jaxserve.server.events import ClientGoneError
from jaxserve.server.guard import AccessLog, BodyReader, HostGuard, KeyGuard
from jaxserve.server.options import is_loopback
from jaxserve.server.routes import (
    chat,
    completions,
    conversations,
    messages,
    models,
    operation,
    pooling,
    responses,
    tokens,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_log = logging.getLogger(__name__)

# No client sees this status; it is for the access log (nginx uses it for a client that left).
_CLIENT_GONE = 499


class _App(FastAPI):
    """An application whose OpenAPI document lacks FastAPI's own response for an invalid body."""

    def __init__(self, backend: Backend, **options: Any):
        self.backend = backend
        super().__init__(**options)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            schema = super().openapi()
            for path in schema["paths"].values():
                for operation_ in path.values():
                    operation_["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
        return super().openapi()


def make_app(backend: Backend, traces: TracerProvider | None = None) -> FastAPI:
    """Return the application that serves a backend; `traces` gets a span per generating request."""
    options = backend.options
    middleware = [
        Middleware(AccessLog, options),
        *([] if traces is None else [_tracing(traces, options.model_name)]),
        *([Middleware(HostGuard, options.host)] if is_loopback(options.host) else []),
        # Before the guard of keys, because browsers ask for leave without one.
        *([_cross_origin(options.allowed_origins)] if options.allowed_origins else []),
        *([Middleware(KeyGuard, options.api_keys)] if options.api_keys else []),
        Middleware(BodyReader, options.max_body_bytes, options.body_timeout_s),
    ]
    app = _App(
        backend,
        title="jaxserve",
        version=__version__,
        description="The API of OpenAI for text models, and endpoints for operation.",
        docs_url=None,  # `routes.operation.docs` says why
        redoc_url=None,
        middleware=middleware,
        exception_handlers={
            JaxserveError: _answer_error,
            RequestValidationError: _answer_bad_body,
            HTTPException: _answer_http_error,
            ClientGoneError: _answer_gone_client,
            Exception: _answer_defect,
        },
    )
    for routes in (
        *(chat, completions, responses, messages, pooling, tokens, conversations),
        *(models, operation),
    ):
        app.include_router(routes.router)
    return app


def _cross_origin(origins: Sequence[str]) -> Middleware:
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id"],
    )


def _tracing(traces: TracerProvider, model: str) -> Middleware:
    from jaxserve.server.spans import Tracing  # needs the extra `otel`

    return Middleware(Tracing, traces, model)


async def _answer_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, JaxserveError)
    http.app.backend.fail_if_over(error)
    if kind_of(error).status == 500:
        _log.error("a request failed", exc_info=error)
    return response_of(error, http.url.path)


async def _answer_bad_body(http: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # A page of another site can send other types without the browser asking this server.
    is_json = "json" in http.headers.get("content-type", "")
    told = "the body is not JSON; send 'content-type: application/json'"
    return response_of(_bad_body(error) if is_json else invalid(told), http.url.path)


def _bad_body(error: RequestValidationError) -> RefusedError:
    first = max(error.errors(), key=_nearness)
    if first["type"] == "json_invalid":
        at = first["loc"][-1]
        return invalid(f"the body is not JSON: {first['ctx']['error']}, at character {at}")
    is_in_body = first["loc"][0] == "body"
    where = _path(first["loc"][1:], error.body) if is_in_body else map(str, first["loc"][1:])
    field = ".".join(where)
    if first["type"] in ("extra_forbidden", "none_required"):
        return invalid(f"the field {field} is not supported by this server; leave it out", field)
    if error.body is None and not field:
        return invalid("the body is empty; send a JSON object")
    if first["type"] == "literal_error":
        expected = first["ctx"]["expected"]
        return invalid(f"{field} has to be {expected} on this server", field)
    given = first["input"]
    shown = f", and it is {given!r:.40}" if isinstance(given, int | float) else ""
    return invalid(f"{field or 'the body'}: {first['msg']}{shown}", field or None)


def _nearness(error: Mapping[str, Any]) -> tuple[int, bool, bool]:
    """Return a sort key of how near an error is to what was meant by a value of several types.

    The deepest is nearest; among equals, one about the value or its name, not about its type.
    """
    kind = error["type"]
    return len(error["loc"]), not kind.endswith("_type"), kind == "literal_error"


def _path(where: Sequence[int | str], body: Any) -> list[str]:
    """Return the path to a field in a body, without the types that it was compared with."""
    path, here = [], body
    for number, part in enumerate(where, 1):
        if isinstance(here, dict) and (part in here or number == len(where)):
            path.append(str(part))
            here = here.get(part)
        elif isinstance(here, list) and isinstance(part, int) and part < len(here):
            path.append(str(part))
            here = here[part]
    return path


async def _answer_http_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = Kind(error.status_code, "invalid_request_error")
    said, path = str(error.detail), http.url.path
    if error.status_code == 404:
        said = f"there is no {path} on this server; those of OpenAI's API begin with /v1, and "
        said += "/openapi.json lists all"
    elif error.status_code == 400:  # FastAPI could not read the body
        said = "the body is not JSON in UTF-8; check its encoding and how deep it is nested"
    elif error.status_code == 405:
        allowed = Headers(error.headers).get("allow", "another method")
        said = f"{path} does not take {http.method}; send {allowed}"
    response = response_of(RefusedError(said, kind), path)
    response.headers.update(error.headers or {})
    return response


async def _answer_gone_client(_: Request, __: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _answer_defect(http: Request, error: Exception) -> Response:
    _log.error("a request failed", exc_info=error)
    told = JaxserveError("the server failed; its log says why")
    return response_of(told, http.url.path)
