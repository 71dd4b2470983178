"""Time, injected: the engine never asks the operating system what time it is."""

from __future__ import annotations

import time
from typing import Protocol, final


class Clock(Protocol):
    """Seconds since an arbitrary origin; never goes back."""

    def now(self) -> float: ...


@final
class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.perf_counter()


@final
class VirtualClock:
    """A clock that moves only when told to: the simulated executor's."""

    def __init__(self, start_s: float = 0.0):
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance_to(self, time_s: float) -> None:
        """Move to `time_s`; earlier times leave the clock as it is."""
        self._now_s = max(self._now_s, time_s)
