"""ASGI middleware: hosts, API keys, limits of bodies, request ids and the access log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import sys
import time
import uuid
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, TextIO, final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.errors import Kind, RefusedError, bad_key, response_of
from jaxserve.server.options import ServerOptions

# Paths of health checks, which the access log leaves out.
_PROBED = frozenset(("/health", "/ready", "/version", "/metrics"))
# Folder of the page's files. They need no key, because they reveal nothing; the page asks for one.
PAGE_PATH = "/page/"

_SMALL_BYTES, _NUM_LARGEST = 1 << 16, 64

# Fields that an endpoint adds to the line of its request in the access log.
_notes: ContextVar[dict[str, Any] | None] = ContextVar("notes", default=None)


Notes = dict[str, Any] | None


def notes_here() -> Notes:
    """Return the fields that endpoints add to the current request's line in the access log."""
    return _notes.get()


def note(notes: Notes, **fields: Any) -> None:
    """Add fields to a line of the access log; None is left out."""
    if notes is not None:
        notes.update((name, value) for name, value in fields.items() if value is not None)


@final
class KeyGuard:
    """Refuses requests without one of the API keys.

    The hashes of all keys are compared, each in constant time, so that the time reveals neither how
    much of a key is right nor which key it is.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope["path"]):
            if not self._is_known(Headers(scope=scope)):
                await _refuse(bad_key(), scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def _is_open(path: str) -> bool:
    return path in _PROBED or path in ("/", "/docs") or path.startswith(PAGE_PATH)


@final
class HostGuard:
    """Refuses requests that name another host than this machine.

    For a server on a loopback address. A page of another site can point its own name at that
    address (DNS rebinding); the browser then sends that name, and takes the server for the site.
    """

    def __init__(self, app: ASGIApp, host: str):
        self._app = app
        self._allowed = {"localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope).get("host", "")
            name = re.sub(r":[0-9]*$", "", given).lower()
            if name not in self._allowed:
                await _refuse(self._misdirected(given), scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _misdirected(self, given: str) -> RefusedError:
        return RefusedError(
            f"the Host header is {given!r}, and this server listens for this machine only; send "
            f"one of {', '.join(sorted(self._allowed))}, or start it with another --host",
            Kind(421, "invalid_request_error", "unknown_host"),
        )


@final
class BodyReader:
    """Reads the whole body before the application runs, within limits of size and time.

    Bodies being read have at most the size of 64 largest bodies in total. Bodies of up to 64 KiB,
    of which there are at most as many as connections, are always read.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float):
        self._app = app
        self._max_bytes = max_bytes
        self._num_bytes = 0  # of all bodies that are being read
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                first = await self._read(scope, receive)
        except TimeoutError:
            await _refuse(self._too_slow(), scope, receive, send)
            return
        except RefusedError as error:
            await _refuse(error, scope, receive, send)
            return
        messages = [first]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, receive_again, send)

    async def _read(self, scope: Scope, receive: Receive) -> Message:
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > self._max_bytes:
            raise self._too_large()
        parts, num_bytes = [], 0
        try:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return message
                parts.append(message.get("body", b""))
                num_bytes += len(parts[-1])
                self._num_bytes += len(parts[-1])
                if num_bytes > self._max_bytes:
                    raise self._too_large()
                if not message.get("more_body", False):
                    return {"type": "http.request", "body": b"".join(parts), "more_body": False}
                if num_bytes > _SMALL_BYTES and self._num_bytes > _NUM_LARGEST * self._max_bytes:
                    raise self._too_many()
        finally:
            self._num_bytes -= num_bytes

    def _too_large(self) -> RefusedError:
        return RefusedError(
            f"the body is larger than the {self._max_bytes} bytes that this server allows; send "
            "less, or raise --max-body",
            Kind(413, "invalid_request_error", "body_too_large"),
        )

    def _too_many(self) -> RefusedError:
        return RefusedError(
            f"the server is reading large bodies of {self._num_bytes} bytes, which is its limit; "
            "try again in a second",
            Kind(503, "server_error", "bodies_busy", True),
            retry_after_s=1.0,
        )

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
            if self._options.log_requests and scope["path"] not in _PROBED:
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
    await response_of(error, scope["path"])(scope, receive, send)
