"""Reads the pieces of a turn beside the client's stream, which may wait or read slowly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import final

from jaxserve.server.exchange import PING_S, STATUS_S, Group, merged


@final
class Relay:
    """Reads groups of pieces on a task of its own, as `Exchange` does for other requests.

    Args:
      groups: read to its end, or closed by `close`.
      status_s, ping_s: seconds without a piece, at the beginning and later on, after which a group
        without pieces is yielded.
    """

    def __init__(
        self, groups: AsyncGenerator[Group], status_s: float = STATUS_S, ping_s: float = PING_S
    ):
        self._ping_s = ping_s
        self._is_silent = False
        self._next_ping = asyncio.get_running_loop().call_later(status_s, self._ping)
        self._pieces: Group = []
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._is_over = False
        self._task = asyncio.ensure_future(self._read(groups))

    async def groups(self) -> AsyncGenerator[Group]:
        """Yield the pieces that have come, until the end; see `Exchange.stream`.

        Raises:
          JaxserveError: the turn failed; raised after its pieces.
        """
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                taken, self._pieces = self._pieces, []
                if taken or (self._is_silent and not self._is_over):
                    yield merged(taken)
                self._is_silent = False
                if self._is_over and not self._pieces:
                    break
            if self._error is not None:
                raise self._error
        finally:
            self.close()

    def close(self) -> None:
        """Cancel the turn if it has not ended. Call it when the client has gone."""
        self._next_ping.cancel()
        self._task.cancel()

    def _ping(self) -> None:
        self._is_silent = True
        self._news.set()
        self._next_ping = asyncio.get_running_loop().call_later(self._ping_s, self._ping)

    async def _read(self, groups: AsyncGenerator[Group]) -> None:
        try:
            async with aclosing(groups):
                async for group in groups:
                    self._pieces += group
                    self._news.set()
        except Exception as error:
            self._error = error
        finally:
            self._is_over = True
            self._news.set()
