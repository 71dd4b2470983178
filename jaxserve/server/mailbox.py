"""A mailbox through which the engine's thread hands pieces to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import final


@final
class Mailbox:
    """A queue of calls for an event loop that any thread may append to.

    However many calls are posted before the loop runs, the loop is woken once: a step of the engine
    brings a piece for each running sequence, and a wake-up is a system call.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._calls: deque[Callable[[], None]] = deque()
        self._is_woken = False

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop make this call soon; do nothing if the loop is closed."""
        self._calls.append(call)
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        # Set before the calls are taken: one that is posted from now on wakes the loop again.
        self._is_woken = False
        while self._calls:
            self._calls.popleft()()
