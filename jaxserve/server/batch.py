"""Batches of OpenAI's form: each line is a request, which the server's own endpoints answer."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, cast, final

from pydantic import ValidationError, model_validator
from starlette.types import ASGIApp, Message, Scope

from jaxserve.core.errors import InvalidRequestError
from jaxserve.runtime import Service
from jaxserve.server.app import make_app
from jaxserve.server.backend import Backend
from jaxserve.server.options import ServerOptions, check_names
from jaxserve.server.schema import MAX_INT32, JsonObject, Strict

# Lines that are being answered; the others are not parsed yet.
_MAX_OPEN = 1024


@final
class BatchLine(Strict):
    """A request of a batch; the endpoint of `url` checks its body."""

    custom_id: str
    method: Literal["POST"]
    url: Literal[
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
    ]
    body: JsonObject

    @model_validator(mode="after")
    def _is_not_streamed(self) -> BatchLine:
        if self.body.get("stream"):
            raise ValueError("stream=true is not possible in a batch; leave it out")
        return self


def parse_line(line: str) -> BatchLine:
    """Return the request of a line of a batch.

    Raises:
      InvalidRequestError: the line is not one; the message names the field.
    """
    try:
        return BatchLine.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise InvalidRequestError(
            f"{field or 'the line'}: {first['msg']}; pass custom_id, method, url and body"
        ) from error


async def answer_lines(
    service: Service,
    model_name: str,
    lines: Sequence[str],
    answers: list[dict[str, Any] | None],
    on_answer: Callable[[dict[str, Any]], object] = lambda _: None,
) -> None:
    """Answer each line of a batch, and put its line of output at its place among the answers.

    Answers are there when they have ended, also if this is cancelled later. A line that is wrong or
    that an endpoint refuses is an answer with its error.

    Args:
      model_name: the name of the model in bodies; those of its adapters select these.
      answers: as many places as lines. Lines whose place is filled are left out, and blank ones.

    Raises:
      InvalidConfigError: an adapter has the model's name.
    """
    check_names(model_name, service.adapters)
    options = ServerOptions(
        model_name=model_name, max_waiting=MAX_INT32, request_timeout_s=None, log_requests=False
    )
    backend = Backend(options)
    app = make_app(backend)
    service.is_ready()  # start loading the executables that an earlier start has stored
    backend.serve(service, service.max_length)
    seen = {each["custom_id"]: i for i, each in enumerate(answers) if each is not None}
    room = asyncio.Semaphore(_MAX_OPEN)

    async def answer(index: int, line: str) -> None:
        try:
            answers[index] = answered = await _answered(app, line, index, seen)
            on_answer(answered)
        finally:
            room.release()

    async with asyncio.TaskGroup() as group:
        for index, line in enumerate(lines):
            if answers[index] is None and line.strip():
                await room.acquire()
                group.create_task(answer(index, line))


async def _answered(app: ASGIApp, line: str, index: int, seen: dict[str, int]) -> dict[str, Any]:
    """Return the line of output for a line; `seen` has the line of each id before."""
    try:
        request = parse_line(line)
        first = seen.setdefault(request.custom_id, index)
        if first != index:
            raise InvalidRequestError(
                f"custom_id {request.custom_id!r} is that of line {first + 1}; give each its own"
            )
    except InvalidRequestError as error:
        said = {"code": "invalid_line", "message": f"line {index + 1}: {error}"}
        return _output(id_of(line), None, said)
    status, request_id, content = await _call(app, request.url, json.dumps(request.body).encode())
    response = {"status_code": status, "request_id": request_id, "body": json.loads(content)}
    return _output(request.custom_id, response, None)


def _output(
    custom_id: str | None, response: dict[str, Any] | None, error: dict[str, str] | None
) -> dict[str, Any]:
    name = f"batch_req_{uuid.uuid4().hex}"
    return {"id": name, "custom_id": custom_id, "response": response, "error": error}


def id_of(line: str) -> str | None:
    """Return the id of a line that is wrong otherwise, if it has one."""
    with suppress(ValueError, RecursionError):
        found = json.loads(line)
        if isinstance(found, dict) and isinstance(found.get("custom_id"), str):
            return found["custom_id"]
    return None


async def _call(app: ASGIApp, path: str, body: bytes) -> tuple[int, str, bytes]:
    """Return the status, the request's id and the body of the application's answer."""
    headers = {
        b"host": b"localhost",
        b"content-type": b"application/json",
        b"content-length": str(len(body)).encode(),
    }
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": list(headers.items()),
    }
    given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    start: dict[str, Any] = {}
    parts: list[bytes] = []

    async def receive() -> Message:
        if not given:  # the client does not leave
            await asyncio.Event().wait()
        return given.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(cast(dict[str, Any], message))
        parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:  # raised after its answer, for a server that logs it
        if not start:
            raise
    sent = dict(start["headers"])
    return start["status"], sent.get(b"x-request-id", b"").decode(), b"".join(parts)
