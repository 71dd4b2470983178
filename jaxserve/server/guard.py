"""ASGI middleware: API keys, time for bodies, request ids and the access log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import sys
import time
import uuid
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, TextIO, final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.errors import Kind, RefusedError, bad_key, body_of, headers_of, kind_of
from jaxserve.server.options import ServerOptions

# Paths that need no key: they are probed by machines and tell nothing about requests.
OPEN_PATHS = frozenset(("/health", "/ready", "/version"))

# Fields that an endpoint adds to the line of its request in the access log.
_notes: ContextVar[dict[str, Any] | None] = ContextVar("notes", default=None)


def note(**fields: Any) -> None:
    """Add fields to the line of the present request in the access log; None is left out."""
    notes = _notes.get()
    if notes is not None:
        notes.update((name, value) for name, value in fields.items() if value is not None)


@final
class KeyGuard:
    """Refuses requests without one of the API keys.

    The hashes of all keys are compared, each in constant time, so that the time says neither how
    much of a key is right nor which key it is.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            if not self._is_known(Headers(scope=scope).get("authorization", "")):
                await _refuse(bad_key(), scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_known(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


@final
class BodyTimer:
    """Refuses requests whose body does not arrive in time."""

    def __init__(self, app: ASGIApp, timeout_s: float):
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        end_s = time.monotonic() + self._timeout_s
        is_complete = False

        async def receive_in_time() -> Message:
            nonlocal is_complete
            if is_complete:  # what follows is the disconnect, which may take as long as it likes
                return await receive()
            try:
                async with asyncio.timeout(max(0.0, end_s - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow() from None
            is_complete = not message.get("more_body", False)
            return message

        await self._app(scope, receive_in_time, send)

    def _too_slow(self) -> RefusedError:
        return RefusedError(
            f"the body did not arrive within {self._timeout_s:g} s; send it faster",
            Kind(408, "timeout_error", "body_timeout"),
        )


@final
class AccessLog:
    """Gives each request an id, and writes a line of JSON when it has ended; none for probes."""

    def __init__(self, app: ASGIApp, options: ServerOptions, sink: TextIO | None = None):
        self._app = app
        self._options = options
        self._sink = sink

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _is_id(given) else f"req-{uuid.uuid4().hex}"
        notes: dict[str, Any] = {}
        token = _notes.set(notes)
        begun_s, status, num_bytes, body = time.monotonic(), 0, 0, bytearray()

        async def send_with_id(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            num_bytes += len(message.get("body", b""))
            await send(message)

        async def receive_and_keep() -> Message:
            message = await receive()
            if self._options.log_prompts:
                body.extend(message.get("body", b""))
            return message

        try:
            await self._app(scope, receive_and_keep, send_with_id)
        finally:
            _notes.reset(token)
            if self._options.log_requests and scope["path"] not in OPEN_PATHS:
                line = {
                    "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    "request_id": request_id,
                    "client": (scope.get("client") or ("",))[0],
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status or None,
                    "bytes": num_bytes,
                    "seconds": round(time.monotonic() - begun_s, 6),
                    **notes,
                }
                if self._options.log_prompts:
                    line["body"] = body.decode("utf-8", "replace")
                sink = self._sink or sys.stdout
                sink.write(json.dumps(line) + "\n")  # one write: lines of threads do not mix
                sink.flush()


def _is_id(given: str) -> bool:
    return 0 < len(given) <= 128 and given.isascii() and given.isprintable()


async def _refuse(error: RefusedError, scope: Scope, receive: Receive, send: Send) -> None:
    response = JSONResponse(
        body_of(error), status_code=kind_of(error).status, headers=headers_of(error)
    )
    await response(scope, receive, send)
