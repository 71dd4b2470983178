"""Answers as JSON, and as streams of server-sent events."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Protocol, final

from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.core.errors import JaxserveError
from jaxserve.server.disconnects import ClientGoneError, unless_gone
from jaxserve.server.errors import body_of
from jaxserve.server.exchange import Group
from jaxserve.server.schema.base import Reply
from jaxserve.server.tracing import trace_here

_log = logging.getLogger(__name__)

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_WAITING = format_sse_event(comment="waiting")
# The place in a reply's JSON for what differs; no text of it can have it, as quotes are escaped.
_NO_CHOICES = b'"choices":[]'

# Returns the JSON of a value, as Pydantic writes it; for parts of a reply that come often. A text
# takes a third of a microsecond, and a list or an object several.
compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class Events(Protocol):
    """The events of one streamed answer, as the bytes that are sent."""

    def begin(self) -> bytes:
        """Return the events before the first piece."""
        ...

    def of(self, group: Group) -> bytes:
        """Return the events of pieces that have come together."""
        ...

    def end(self) -> bytes:
        """Return the events after the last piece of an answer that is complete."""
        ...


def json_response(reply: Reply) -> Response:
    """Return an answer as JSON."""
    return Response(reply.model_dump_json(), media_type="application/json")


def event_of(reply: Reply, kind: str | None = None) -> bytes:
    """Return the event whose data is a reply's JSON.

    Args:
      kind: type of the event; none by default.
    """
    return format_sse_event(event=kind, data_str=reply.model_dump_json())


def comments(texts: Iterable[str]) -> bytes:
    """Return comments, which clients skip."""
    return b"".join(format_sse_event(comment=text) for text in texts)


@final
class ChoiceEvent:
    """The event of a reply that differs from others in its choice only; the rest is made once.

    Args:
      reply: without choices.
    """

    def __init__(self, reply: Reply):
        head, tail = event_of(reply).split(_NO_CHOICES)
        self._head = head + _NO_CHOICES[:-1]
        self._tail = _NO_CHOICES[-1:] + tail

    def of(self, choice: str) -> bytes:
        """Return the event with this choice, in JSON."""
        return self._head + choice.encode() + self._tail


class EventStream(EventSourceResponse):
    """A stream of events, whose status is sent with the first of them.

    An error before has its own status; one after the first event is the last one, in the format
    that OpenAI's clients raise. The generator of pieces is closed when the client closes the
    connection.

    Args:
      groups: the pieces; a group without any says that the client still waits.
      events: makes the events of the pieces.
      close: ends what the pieces come from; called at the end, also where the client left before
        the first piece was asked for, so that the generator never began.
      last: event after the last one.
      error_event: type of an error's event; none by default.
    """

    def __init__(
        self,
        groups: AsyncGenerator[Group],
        events: Events,
        close: Callable[[], None],
        last: bytes = b"data: [DONE]\n\n",
        error_event: str | None = None,
    ):
        self._groups = groups
        self._events = events
        self._close = close
        self._last = last
        self._error_event = error_event
        self._has_begun = False
        super().__init__((), headers=_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._groups):
                # Starlette does the same with a task more for each stream.
                await unless_gone(receive, self._run(send))
        except ClientGoneError:
            if not self._has_begun:
                raise
        finally:
            self._close()

    async def _run(self, send: Send) -> None:
        try:
            async for group in self._groups:
                body = b"" if self._has_begun else await self._start(send)
                body += self._events.of(group) if group else _WAITING
                if body:
                    await self._send(send, body)
            rest = b"" if self._has_begun else await self._start(send)
            rest += self._events.end() + self._last
        except JaxserveError as error:
            if not self._has_begun:
                raise
            rest = self._failure(error)
        except Exception:
            if not self._has_begun:
                raise
            _log.exception("a stream failed")
            rest = self._failure(JaxserveError("the server failed; its log says why"))
        await self._send(send, rest, is_last=True)

    async def _start(self, send: Send) -> bytes:
        """Send the status, and return the first events."""
        self._has_begun = True
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        return self._events.begin()

    async def _send(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})

    def _failure(self, error: JaxserveError) -> bytes:
        """Return the event of an error that the status does not say; its span does."""
        trace_here().failed(error)
        return format_sse_event(event=self._error_event, data_str=json.dumps(body_of(error)))
