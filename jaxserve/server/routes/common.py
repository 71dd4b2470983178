"""The parts that endpoints share: the backend, ids, documented errors."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, Protocol

from fastapi import Depends, Header
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core.errors import InvalidRequestError
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.runtime import Service
from jaxserve.server.backend import Backend
from jaxserve.server.errors import invalid
from jaxserve.server.events import json_response, unless_gone
from jaxserve.server.exchange import Exchange, Job
from jaxserve.server.guard import note, notes_here
from jaxserve.server.options import LATENCY_HEADER, LatencyClass
from jaxserve.server.schema import ErrorReply, Reply, Strict, Unheeded

_MEANINGS = {
    400: "The request cannot be served as given.",
    401: "The API key is missing or wrong.",
    404: "The model or the conversation does not exist, or the server was not started for this.",
    408: "The body did not arrive in time.",
    409: "The conversation is being answered or of another model, or the adapter is in use.",
    413: "The body is larger than the server allows.",
    421: "The server is for its own machine, and the Host header names another one.",
    429: "The queue is full.",
    500: "The server failed.",
    501: "The server lacks an optional package that the request needs.",
    503: "The server is loading or shutting down, or reads too many large bodies.",
    504: "The answer was not complete in time.",
}
# An event of a stream, in the form of FastAPI's own description.
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
# Bytes of a body whose prompt is tokenized in about a millisecond.
_SHORT_BYTES = 4096
# A server on a loopback address refuses other hosts on every path.
_EVERYWHERE = (421,)
READING = (400, 401, 404, 408, 413, 503)
ANSWERING = (400, 401, 404, 408, 409, 413, 429, 500, 501, 503, 504)


def documented(
    *statuses: int, stream: bool = False, error: type[Reply] = ErrorReply
) -> dict[int | str, dict[str, Any]]:
    """Return the documentation of an endpoint's errors, with the common ones, and of its events."""
    found: dict[int | str, dict[str, Any]] = {
        status: {"model": error, "description": _MEANINGS[status]}
        for status in (*statuses, *_EVERYWHERE)
    }
    if stream:
        events = {"text/event-stream": {"itemSchema": _EVENT}}
        found[200] = {"content": events, "description": "JSON, or events with `stream`."}
    return found


async def _backend(http: Request) -> Backend:  # on the event loop; other functions get a thread
    return http.app.backend


Here = Annotated[Backend, Depends(_backend)]


async def _latency_class(
    backend: Here,
    name: Annotated[
        str | None,
        Header(
            alias=LATENCY_HEADER,
            description="A class of latency bounds that the server was started with.",
        ),
    ] = None,
) -> LatencyClass:
    if name is None:
        return LatencyClass({})
    classes = backend.options.latency_classes
    if name not in classes:
        known = f"this server has {', '.join(sorted(classes))}" if classes else "it has none"
        raise invalid(
            f"{LATENCY_HEADER}: {name} is not a latency class of this server; {known}. Pass one of "
            "these, or leave the header out",
            LATENCY_HEADER,
        )
    return LatencyClass(classes[name])


InClass = Annotated[LatencyClass, Depends(_latency_class)]


class ChatAnswering(Protocol):
    """A chat that is answered, in the form of one API."""

    def jobs(self, service: Service, /) -> list[Job]: ...

    def reply(self, completion: Completion) -> Reply: ...


async def replied(http: Request, exchange: Exchange, answer: ChatAnswering) -> Response:
    """Return the whole answer to a chat."""
    (completion,) = await unless_gone(http.receive, exchange.answer(answer.jobs))
    return json_response(answer.reply(completion))


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def now_s() -> int:
    """Return the seconds since 1970."""
    return int(time.time())


def need_tokenizer(service: Service) -> Tokenizer:
    if service.tokenizer is None:
        raise InvalidRequestError(
            "this model is served without a tokenizer; send token ids to /inference/v1/generate"
        )
    return service.tokenizer


def check_fields(body: Unheeded, backend: Backend) -> None:
    """Do the same as `check_ignored`, and write to the access log who asks."""
    check_ignored(body, backend)
    note(notes_here(), user=body.user, safety_identifier=body.safety_identifier)


def check_ignored(body: Strict, backend: Backend) -> None:
    """Name fields without effect in the access log; refuse them where the server is strict."""
    names = sorted(body.ignored())
    if names and backend.options.strict_fields:
        raise invalid(
            f"{names[0]} has no effect on this server, which was started to refuse such fields "
            "(--strict-fields); leave it out",
            names[0],
        )
    note(notes_here(), ignored=names or None)


def check_num_samples(num_samples: int, backend: Backend) -> None:
    """Check the number of samples of a request, over all its prompts."""
    most = backend.options.max_samples
    if num_samples > most:
        raise invalid(
            f"{num_samples} samples were asked for, and this server allows {most} in one request; "
            "lower n, or send fewer prompts",
            "n",
        )


def is_short(http: Request, backend: Backend, params: SamplingParams) -> bool:
    """Return whether a prompt is made and submitted in about a millisecond.

    If threads compete for few cores, starting another thread takes longer. Compiling a grammar and
    waiting for a prediction always take longer.
    """
    num_bytes = http.headers.get("content-length", "")
    if params.is_constrained or backend.ready_service().options.predictor is not None:
        return False
    return num_bytes.isdecimal() and int(num_bytes) <= _SHORT_BYTES
