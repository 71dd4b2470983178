"""HTTP/1.1 with a time limit for the head of a request, which uvicorn has not."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedProtocol(H11Protocol):
    """A connection that is closed if the head of a request takes too long.

    A client that opens connections and sends nothing, or a byte now and then, holds none of them.
    """

    header_timeout_s = 10.0

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def with_timeout(cls, header_timeout_s: float) -> type[TimedProtocol]:
        """Return the protocol with this limit; uvicorn makes an object for each connection."""
        return type("TimedProtocol", (cls,), {"header_timeout_s": header_timeout_s})

    def connection_made(self, transport: asyncio.Transport) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        if self._is_answering:
            self._stop_timer()
        elif self._timer is None:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._stop_timer()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        """Whether the head of a request has come, and its answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.header_timeout_s, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if not self._is_answering and not self.transport.is_closing():
            self.transport.close()
