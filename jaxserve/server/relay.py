"""Reads the pieces of a turn beside the client's stream, which may wait or read slowly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import final

from jaxserve.server.exchange import PING_S, STATUS_S, Group, merged


@final
class Relay:
    """Reads groups of pieces on a task of its own, as `Exchange` does for other requests.

    Args:
      groups: read to its end, or closed by `close`.
      ping_s: seconds without a piece after which a group without pieces is yielded.
    """

    def __init__(self, groups: AsyncGenerator[Group], ping_s: float = PING_S):
        self._ping_s = ping_s
        self._pieces: Group = []
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._is_over = False
        self._task = asyncio.ensure_future(self._read(groups))

    async def until_begun(self, timeout_s: float = STATUS_S) -> None:
        """Wait for the first piece, or for some seconds.

        Raises:
          JaxserveError: the turn failed before its first piece.
        """
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), timeout_s)
            if self._error is not None and not self._pieces:
                raise self._error
        except BaseException:
            self.close()
            raise

    async def groups(self) -> AsyncGenerator[Group]:
        """Yield the pieces that have come, until the end; see `Exchange.pieces`.

        Raises:
          JaxserveError: the turn failed; raised after its pieces.
        """
        try:
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), self._ping_s)
                self._news.clear()
                taken, self._pieces = self._pieces, []
                if taken or not self._is_over:
                    yield merged(taken)
                if self._is_over and not self._pieces:
                    break
            if self._error is not None:
                raise self._error
        finally:
            self.close()

    def close(self) -> None:
        """Cancel the turn if it has not ended. Call it when the client has gone."""
        self._task.cancel()

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
