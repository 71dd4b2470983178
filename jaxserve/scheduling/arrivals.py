"""How often requests have come lately, while others were at work."""

from __future__ import annotations

from collections import deque
from typing import final

# Arrivals that count, the newest ones.
_NUM_RECENT = 16
# Requests that come within this time of each other come together.
_TOGETHER_S = 0.01


@final
class Arrivals:
    """The rate of arrivals that found others at work.

    Only those wait for what the device is doing. Requests that come together count once, so that a
    batch is one arrival; and one after the other, each sent when the last was answered, are none.
    """

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self._newest_s = float("-inf")

    def note(self, now_s: float, *, is_busy: bool) -> None:
        """Note an arrival.

        Args:
          is_busy: whether other requests ran or waited.
        """
        if is_busy and now_s - self._newest_s > _TOGETHER_S:
            self._times_s.append(now_s)
        self._newest_s = now_s

    def rate(self, now_s: float) -> float:
        """Return the arrivals a second that are expected from now on; 0 where none is known.

        Those after the first of the newest ones, over the time since then: the longer none has
        come, the fewer are expected.
        """
        if len(self._times_s) < 2:
            return 0.0
        return (len(self._times_s) - 1) / max(now_s - self._times_s[0], 1e-9)
