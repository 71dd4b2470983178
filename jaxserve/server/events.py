"""Answers as JSON, and as streams of server-sent events."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.core.errors import JaxserveError
from jaxserve.server.disconnects import ClientGoneError, unless_gone
from jaxserve.server.errors import body_of
from jaxserve.server.schema.base import Reply

_log = logging.getLogger(__name__)

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

# Replies in their order; a text is a comment.
Replies = AsyncGenerator[Reply | str]


def json_response(reply: Reply) -> Response:
    """Return an answer as JSON."""
    return Response(reply.model_dump_json(), media_type="application/json")


def data_event(reply: Reply) -> bytes:
    """Return the event whose data is a reply's JSON."""
    return format_sse_event(data_str=reply.model_dump_json())


class EventStream(EventSourceResponse):
    """A stream of events.

    An error after the first event is the last one, in the format that OpenAI's clients raise. The
    generator of replies is closed when the client closes the connection.

    Args:
      close: ends what the replies are made of; called at the end, also where the client left before
        the first reply was asked for, so that the generator never began.
      to_event: returns the event of a reply.
      last: event after the last reply.
      error_event: type of an error's event; none by default.
    """

    def __init__(
        self,
        replies: Replies,
        close: Callable[[], None],
        to_event: Callable[[Reply], bytes] = data_event,
        last: bytes = b"data: [DONE]\n\n",
        error_event: str | None = None,
    ):
        self._replies = replies
        self._close = close
        self._events = _events(replies, to_event, last, error_event)
        super().__init__(self._events, headers=_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._replies), aclosing(self._events):
                # Starlette does the same with a task more for each stream.
                with suppress(ClientGoneError):
                    await unless_gone(receive, self.stream_response(send))
        finally:
            self._close()


async def _events(
    replies: Replies, to_event: Callable[[Reply], bytes], last: bytes, error_event: str | None
) -> AsyncGenerator[bytes]:
    try:
        async for reply in replies:
            if isinstance(reply, str):
                yield format_sse_event(comment=reply)
            else:
                yield to_event(reply)
        yield last
    except JaxserveError as error:
        yield format_sse_event(event=error_event, data_str=json.dumps(body_of(error)))
    except Exception:
        _log.exception("a stream failed")
        unknown = JaxserveError("the server failed; its log says why")
        yield format_sse_event(event=error_event, data_str=json.dumps(body_of(unknown)))
