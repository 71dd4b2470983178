"""Slots of the device batch: which are live, and how to compact them."""

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
    """Tracks which slots are live. A decode loop runs over a contiguous window of slots."""

    def __init__(self, num_slots: int, buckets: tuple[int, ...]):
        self._num_slots = num_slots
        # Bit i says whether slot i is live.
        self._live = 0
        self._buckets = buckets

    @property
    def num_live(self) -> int:
        return self._live.bit_count()

    def take(self) -> int:
        """Allocate the free slot that widens the live span least: a hole, else a neighbour."""
        low, high = self._span() or (0, 0)
        # The lowest free slot from the first live one on is a hole, or follows the last live one.
        slot = low + _lowest_bit(~(self._live >> low))
        if slot == high == self._num_slots:
            slot = low - 1
        self._live |= 1 << slot
        return slot

    def release(self, slot: int) -> None:
        if not self._live >> slot & 1:
            raise ValueError(f"slot {slot} is not live")
        self._live ^= 1 << slot

    def window(self, min_size: int = 0) -> tuple[int, int]:
        """Return (start, size) of the smallest compiled window over all live slots.

        It spans at least `min_size` slots, those before the live ones first.
        """
        low, high = self._span() or (0, 1)
        low = max(0, min(low, high - min_size))
        size = bucket(max(high - low, min_size), self._buckets)
        return min(low, self._num_slots - size), size

    def window_of_one(self, slot: int) -> tuple[int, int] | None:
        """Return (start, size) of the smallest compiled window with no live slot but `slot`."""
        size = self._buckets[0]
        window = (1 << size) - 1
        for start in range(max(0, slot - size + 1), min(slot, self._num_slots - size) + 1):
            if (self._live >> start & window).bit_count() == 1:
                return start, size
        return None

    def compact(self) -> list[tuple[int, int]]:
        """Move the live slots into the smallest window, if that is smaller; return (from, to)."""
        if not self._live:
            return []
        size = bucket(self.num_live, self._buckets)
        if size >= self.window()[1]:
            return []
        live = [bool(self._live >> slot & 1) for slot in range(self._num_slots)]
        start = fewest_moves_window(live, size)
        inside = range(start, start + size)
        holes = iter([slot for slot in inside if not live[slot]])
        strays = [slot for slot in range(self._num_slots) if live[slot] and slot not in inside]
        moves = [(stray, next(holes)) for stray in strays]
        for source, target in moves:
            self._live ^= 1 << source | 1 << target
        return moves

    def _span(self) -> tuple[int, int] | None:
        if not self._live:
            return None
        return _lowest_bit(self._live), self._live.bit_length()


def _lowest_bit(number: int) -> int:
    return (number & -number).bit_length() - 1
