"""Slots of the device batch: which are live, and how to bring those together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from jaxserve.core.config import bucket


def fewest_moves_window(live: Sequence[bool], size: int) -> int:
    """Return the start of the window of `size` slots that already holds the most live ones.

    Moving the live slots outside of it into its holes then moves the fewest. O(n) by a sliding
    window, as Algorithm 3 of Flover (section V-D); unlike the listing there, the first window
    counts too. Ties go to the lowest start.
    """
    inside = sum(live[:size])
    best, best_start = inside, 0
    for start in range(1, len(live) - size + 1):
        inside += live[start + size - 1] - live[start - 1]
        if inside > best:
            best, best_start = inside, start
    return best_start


@final
class SlotTable:
    """Counts which slots are live. A decode loop runs over a contiguous window of slots."""

    def __init__(self, num_slots: int, buckets: tuple[int, ...]):
        self._live = [False] * num_slots
        self._buckets = buckets

    @property
    def num_live(self) -> int:
        return sum(self._live)

    @property
    def num_free(self) -> int:
        return len(self._live) - self.num_live

    def take(self) -> int:
        """Allocate the free slot that widens the live span least: a hole, else a neighbour."""
        span = self._span()
        if span is None:
            slot = 0
        else:
            low, high = span
            holes = [slot for slot in range(low, high) if not self._live[slot]]
            slot = holes[0] if holes else (high if high < len(self._live) else low - 1)
        self._live[slot] = True
        return slot

    def release(self, slot: int) -> None:
        if not self._live[slot]:
            raise ValueError(f"slot {slot} is not live")
        self._live[slot] = False

    def window(self, min_size: int = 0) -> tuple[int, int]:
        """Return (start, size) of the smallest compiled window over every live slot.

        Args:
          min_size: slots that it spans at least, those before the live ones first.
        """
        low, high = self._span() or (0, 1)
        low = max(0, min(low, high - min_size))
        size = bucket(max(high - low, min_size), self._buckets)
        return min(low, len(self._live) - size), size

    def window_of_one(self, slot: int) -> tuple[int, int] | None:
        """Return (start, size) of the smallest compiled window with no live slot but `slot`."""
        size = self._buckets[0]
        for start in range(max(0, slot - size + 1), min(slot, len(self._live) - size) + 1):
            if sum(self._live[start : start + size]) == 1:
                return start, size
        return None

    def compact(self) -> list[tuple[int, int]]:
        """Bring the live slots into the smallest window that holds their number.

        Nothing moves unless the decode window gets smaller by it. Returns (from, to) pairs.
        """
        if self.num_live == 0:
            return []
        size = bucket(self.num_live, self._buckets)
        if size >= self.window()[1]:
            return []
        start = fewest_moves_window(self._live, size)
        inside = range(start, start + size)
        holes = iter([slot for slot in inside if not self._live[slot]])
        strays = [slot for slot, live in enumerate(self._live) if live and slot not in inside]
        moves = [(stray, next(holes)) for stray in strays]
        for source, target in moves:
            self._live[source], self._live[target] = False, True
        return moves

    def _span(self) -> tuple[int, int] | None:
        if True not in self._live:
            return None
        low = self._live.index(True)
        high = len(self._live) - self._live[::-1].index(True)
        return low, high
