"""Answers as JSON and as streams of server-sent events, which end when the client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar, final

from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.core.errors import JaxserveError
from jaxserve.engine.answers import Piece
from jaxserve.scheduling.lengths import LengthEstimate
from jaxserve.server.errors import body_of
from jaxserve.server.exchange import Group
from jaxserve.server.schema import Reply
from jaxserve.server.tracing import trace_here

_T = TypeVar("_T")

# Seconds between two comments on one sample; a changed estimate gets one at once.
_COMMENT_S = 0.5
# Quantiles of the distribution that a comment lists.
_LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9)

_log = logging.getLogger(__name__)

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_WAITING = format_sse_event(comment="waiting")
# Placeholder in a reply's JSON for the part that differs; no text has it (quotes are escaped).
_NO_CHOICES = b'"choices":[]'

# Returns the JSON of a value, as Pydantic writes it; for frequent parts of a reply. A text
# takes a third of a microsecond, and a list or an object several.
compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class ClientGoneError(Exception):
    """The client has closed the connection before the answer ended."""


async def unless_gone(receive: Receive, work: Awaitable[_T]) -> _T:
    """Wait for work; cancel it, and raise ClientGoneError, if the client closes the connection.

    The caller's task does it, since each additional task costs turns of the event loop.
    """
    task = asyncio.current_task()
    assert task is not None, "it is called in a task"
    has_gone = False

    async def until_gone() -> None:
        nonlocal has_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        has_gone = True
        task.cancel()

    watch = asyncio.ensure_future(until_gone())
    try:
        return await work
    except asyncio.CancelledError:
        if has_gone and task.uncancel() == 0:
            raise ClientGoneError from None
        raise
    finally:
        watch.cancel()


@final
class LengthComments:
    """The comments of one stream: one with each sample's first piece, then updates.

    A comment is JSON, with the expected number of tokens of the answer (`predicted_tokens`), the
    lengths that 10, 25, 50, 75 and 90 % of such answers do not exceed (`percentiles`), the tokens
    so far (`num_tokens`) and the seconds until the end (`ends_in_s`): at `pace_s` in the first
    comment, and then at the pace of the stream so far.

    Args:
      max_tokens: limit of each sample; None for the context's.
      pace_s: recent seconds per token of other answers; None if there were none.

    Attributes:
      predicted: the first `predicted_tokens` of each sample, by the index of its choice.
    """

    def __init__(self, max_tokens: int | None, pace_s: float | None):
        self._most = math.inf if max_tokens is None else max_tokens
        self._pace_s = pace_s
        self._samples: dict[int, _Sample] = {}
        self.predicted: dict[int, int] = {}

    def of(self, pieces: Iterable[tuple[int, Piece]]) -> bytes:
        """Return the comments that go before pieces, each with the index of its choice."""
        now_s = time.monotonic()
        found = [self._next(index, piece, now_s) for index, piece in pieces]
        return b"".join(format_sse_event(comment=each) for each in found if each is not None)

    def _next(self, index: int, piece: Piece, now_s: float) -> str | None:
        sample = self._samples.get(index)
        if sample is None:
            if piece.estimate is None:
                return None
            sample = self._samples[index] = _Sample(piece.estimate, now_s, len(piece.token_ids))
            return self._comment(index, sample, 0, self._pace_s)
        pace_s = sample.add(piece, now_s)
        is_due = piece.estimate is not None or now_s >= sample.told_s + _COMMENT_S
        if not is_due or piece.finish_reason is not None:
            return None
        sample.told_s = now_s
        return self._comment(index, sample, sample.num_tokens, pace_s)

    def _comment(self, index: int, sample: _Sample, num_tokens: int, pace_s: float | None) -> str:
        left = min(sample.estimate.expected_remaining(num_tokens), self._most - num_tokens)
        predicted = num_tokens + math.ceil(left)
        self.predicted.setdefault(index, predicted)
        told: dict[str, Any] = {
            "index": index,
            "predicted_tokens": predicted,
            "percentiles": [
                min(sample.estimate.percentile(level, num_tokens), self._most) for level in _LEVELS
            ],
            "num_tokens": num_tokens,
        }
        if pace_s is not None:
            told["ends_in_s"] = round(left * pace_s, 3)
        return json.dumps(told)


@final
class _Sample:
    """The estimate, the tokens and the times of one sample."""

    def __init__(self, estimate: LengthEstimate, now_s: float, num_tokens: int):
        self.estimate = estimate
        self.told_s = self._first_s = now_s
        self.num_tokens = self._num_first = num_tokens

    def add(self, piece: Piece, now_s: float) -> float | None:
        """Record a later piece; return the seconds per token, or None before they are known."""
        self.estimate = piece.estimate or self.estimate
        self.num_tokens += len(piece.token_ids)
        later = self.num_tokens - self._num_first
        return (now_s - self._first_s) / later if later else None


class Events(Protocol):
    """The events of one streamed answer, as the bytes that are sent."""

    def begin(self) -> bytes:
        """Return the events before the first piece."""
        ...

    def of(self, group: Group) -> bytes:
        """Return the events of pieces that have arrived together."""
        ...

    def end(self) -> bytes:
        """Return the events after the last piece of an answer that is complete."""
        ...


def json_response(reply: Reply) -> Response:
    return Response(reply.model_dump_json(), media_type="application/json")


def event_of(reply: Reply, kind: str | None = None) -> bytes:
    """Return the event whose data is a reply's JSON; `kind` is the event's type, if any."""
    return format_sse_event(event=kind, data_str=reply.model_dump_json())


@final
class ChoiceEvent:
    """The event of replies (given without choices) that differ only in their choice."""

    def __init__(self, reply: Reply):
        head, tail = event_of(reply).split(_NO_CHOICES)
        self._head = head + _NO_CHOICES[:-1]
        self._tail = _NO_CHOICES[-1:] + tail

    def of(self, choice: str) -> bytes:
        """Return the event with this choice, in JSON."""
        return self._head + choice.encode() + self._tail


class EventStream(EventSourceResponse):
    """A stream of events, whose status is sent with the first event.

    An error before the first event has its own status. A later error is the last event, in the
    form that clients of the API raise. When the client closes the connection, the generator of
    pieces is closed.

    Args:
      groups: the pieces; an empty group says that the client still waits.
      close: ends the source of the pieces; called at the end, even if the client left before the
        generator began.
      error_event: type of an error's event; none by default.
      waiting: what is sent for an empty group.
    """

    def __init__(
        self,
        groups: AsyncGenerator[Group],
        events: Events,
        close: Callable[[], None],
        last: bytes = b"data: [DONE]\n\n",
        error_event: str | None = None,
        waiting: bytes = _WAITING,
    ):
        self._groups = groups
        self._events = events
        self._close = close
        self._last = last
        self._error_event = error_event
        self._waiting = waiting
        self._has_begun = False
        super().__init__((), headers=_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._groups):
                # Starlette does the same with one more task per stream.
                await unless_gone(receive, self._run(send, scope["path"]))
        except ClientGoneError:
            if not self._has_begun:
                raise
        finally:
            self._close()

    async def _run(self, send: Send, path: str) -> None:
        try:
            async for group in self._groups:
                body = b"" if self._has_begun else await self._start(send)
                body += self._events.of(group) if group else self._waiting
                if body:
                    await self._send(send, body)
            rest = b"" if self._has_begun else await self._start(send)
            rest += self._events.end() + self._last
        except JaxserveError as error:
            if not self._has_begun:
                raise
            rest = self._failure(error, path)
        except Exception:
            if not self._has_begun:
                raise
            _log.exception("a stream failed")
            rest = self._failure(JaxserveError("the server failed; its log says why"), path)
        await self._send(send, rest, is_last=True)

    async def _start(self, send: Send) -> bytes:
        self._has_begun = True
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        return self._events.begin()

    async def _send(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})

    def _failure(self, error: JaxserveError, path: str) -> bytes:
        """Return the event of an error after the status was sent; its span records the error."""
        trace_here().failed(error)
        return format_sse_event(event=self._error_event, data_str=json.dumps(body_of(error, path)))
