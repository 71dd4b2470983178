"""Clocks. The engine reads time from the clock that it is given, never from the system."""

from __future__ import annotations

import heapq
import time
from typing import Protocol, final

# Much less than a step takes.
_POLL_S = 1e-4


class Clock(Protocol):
    """A source of time, in seconds since an arbitrary origin; it never goes back."""

    def now(self) -> float: ...

    def wait(self) -> None:
        """Let time pass until an event may have happened that the caller waits for."""
        ...


@final
class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        time.sleep(_POLL_S)


@final
class VirtualClock:
    """A clock that only `advance_to` and `wait` move, for the simulated executor."""

    def __init__(self, start_s: float = 0.0):
        self._now_s = start_s
        self._expected_s: list[float] = []

    def now(self) -> float:
        return self._now_s

    def advance_to(self, time_s: float) -> None:
        """Move to `time_s`, unless it is in the past."""
        self._now_s = max(self._now_s, time_s)
        while self._expected_s and self._expected_s[0] <= self._now_s:
            heapq.heappop(self._expected_s)

    def expect(self, time_s: float) -> None:
        """Announce an event at `time_s`, to which `wait` may advance."""
        if time_s > self._now_s:
            heapq.heappush(self._expected_s, time_s)

    def wait(self) -> None:
        """Advance to the next announced event, or raise AssertionError."""
        assert self._expected_s, "nothing is expected, so waiting would not end"
        self.advance_to(self._expected_s[0])
