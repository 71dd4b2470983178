"""Clocks. The engine reads time from a clock that it is given, never from the system."""

from __future__ import annotations

import time
from typing import Protocol, final


class Clock(Protocol):
    """A source of time, in seconds since an arbitrary origin; it never goes back."""

    def now(self) -> float: ...


@final
class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.perf_counter()


@final
class VirtualClock:
    """A clock that only `advance_to` moves; the simulated executor uses it."""

    def __init__(self, start_s: float = 0.0):
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance_to(self, time_s: float) -> None:
        """Move to `time_s`, unless it is in the past."""
        self._now_s = max(self._now_s, time_s)
