"""Sequences that wait for a slot and memory."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

from jaxserve.scheduling.kv.prefix_cache import num_shareable
from jaxserve.scheduling.order import OrderKeys
from jaxserve.scheduling.sequence import Phase, Sequence

# The most entries of a block.
_MAX_ENTRIES = 128
# The least pages of a sequence whose tokens are in flight: they may change its reservation.
_UNKNOWN = -1


@final
@dataclass(eq=False, slots=True)
class _Entry:
    """A waiting sequence.

    `place` is its order key and its own key, so no two are equal; `num_passed` counts later
    sequences admitted before it, not counting its block's `num_passed`.
    """

    place: tuple[Any, int]
    sequence: Sequence
    least_pages: int
    num_passed: int = 0


@final
class _EntryBlock:
    """A run of entries in order; a search skips blocks of which no entry can be admitted now.

    `num_passed` counts passes of every entry; `least_pages` and `most_passed` are extremes of the
    entries' own values; `num_bounded` have a latency bound of their own.
    """

    __slots__ = ("entries", "least_pages", "most_passed", "num_bounded", "num_passed")

    def __init__(self, entries: list[_Entry], num_passed: int = 0):
        self.entries = entries
        self.num_passed = num_passed
        self.num_bounded = sum(entry.sequence.request.has_bounds for entry in entries)
        self.measure()

    def measure(self) -> None:
        self.least_pages = min(entry.least_pages for entry in self.entries)
        self.most_passed = max(entry.num_passed for entry in self.entries)

    def add(self, entry: _Entry) -> None:
        """Insert an entry whose `num_passed` counts all of its passes."""
        entry.num_passed -= self.num_passed
        bisect.insort(self.entries, entry, key=_place)
        self.least_pages = min(self.least_pages, entry.least_pages)
        self.most_passed = max(self.most_passed, entry.num_passed)
        self.num_bounded += entry.sequence.request.has_bounds

    def split(self) -> _EntryBlock:
        half = len(self.entries) // 2
        upper = _EntryBlock(self.entries[half:], self.num_passed)
        del self.entries[half:]
        self.num_bounded -= upper.num_bounded
        self.measure()
        return upper


@final
class WaitingPool:
    """Waiting sequences in the policy's order; a key is computed when a sequence begins to wait.

    A sequence that does not fit is passed by later ones as often as the order allows. The sequences
    are in blocks that know their least pages, so the cost of a search is the number of blocks and
    one of them, not the number of sequences. `least_pages` returns the fewest pages that a sequence
    can begin with; unless tokens are in flight, only `replace` and `sort` may change it while it
    waits.
    """

    def __init__(
        self,
        keys: OrderKeys,
        max_passes: int,
        page_size: int,
        least_pages: Callable[[Sequence], int],
    ):
        self._keys = keys
        self._max_passes = max_passes
        self._page_size = page_size
        self._least_pages = least_pages
        # None is empty.
        self._blocks: list[_EntryBlock] = []
        self._entries: dict[int, _Entry] = {}
        # Keys of sequences with a latency bound of their own.
        self._bounded: set[int] = set()
        # Sequences that ran before, by their keys.
        self._begun: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def has_bounded(self) -> bool:
        return bool(self._bounded)

    @property
    def begun(self) -> list[Sequence]:
        """Sequences that ran before, in no order."""
        return list(self._begun.values())

    def __iter__(self) -> Iterator[Sequence]:
        return iter([entry.sequence for block in self._blocks for entry in block.entries])

    def add(self, sequence: Sequence) -> None:
        self._add(self._new_entry(sequence))

    def remove(self, sequence: Sequence) -> None:
        self._remove(sequence)

    def replace(self, sequence: Sequence) -> None:
        """Recompute the key of a waiting sequence, because its answer or estimate changed."""
        num_passed = self._remove(sequence)
        self._add(self._new_entry(sequence, num_passed))

    def sort(self) -> None:
        """Recompute every key, because limits or estimates changed that the order uses."""
        entries = [
            self._new_entry(entry.sequence, block.num_passed + entry.num_passed)
            for block in self._blocks
            for entry in block.entries
        ]
        entries.sort(key=_place)
        size = _MAX_ENTRIES // 2
        self._blocks = [_EntryBlock(entries[i : i + size]) for i in range(0, len(entries), size)]

    def ready(self) -> Iterator[Sequence]:
        """Yield the sequences that could run at once if they fitted.

        A sequence whose tokens are still in flight ends the iteration, unless it may be passed.
        """
        for block in self._blocks:
            for entry in block.entries:
                if entry.sequence.num_in_flight:
                    if not self._may_be_passed(block, entry):
                        return
                elif not _waits_for_primary(entry.sequence, self._page_size):
                    yield entry.sequence

    def first_that(
        self,
        fits: Callable[[Sequence], bool],
        awaits: Callable[[Sequence], bool],
        num_available: int,
        *,
        only_bounded: bool = False,
    ) -> Sequence | None:
        """Return the first sequence that fits, if it may pass those before it.

        Args:
          fits: whether a sequence fits into `num_available` pages; called only for those that could
            by their least pages.
          awaits: whether a sequence fits but waits for something else; then any other may pass it.
          only_bounded: all without a latency bound of their own wait for something else. Once one
            of them has fitted, the search passes the rest without a look at their memory.
        """
        passes_unbounded = False
        for block in self._blocks:
            if passes_unbounded and not block.num_bounded:
                continue
            may_all_be_passed = block.num_passed + block.most_passed < self._max_passes
            if may_all_be_passed and block.least_pages > num_available:
                continue
            for entry in block.entries:
                sequence = entry.sequence
                is_passed = only_bounded and sequence.key not in self._bounded
                if is_passed and passes_unbounded:
                    continue
                if not sequence.num_in_flight:
                    if _waits_for_primary(sequence, self._page_size):
                        continue
                    if self._known_pages(block, entry) <= num_available and fits(sequence):
                        passes_unbounded = passes_unbounded or is_passed
                        if is_passed or awaits(sequence):
                            continue
                        return sequence
                if not (may_all_be_passed or self._may_be_passed(block, entry)):
                    return None
        return None

    def admit(self, sequence: Sequence) -> None:
        """Remove a sequence that runs from now on; those before it were passed."""
        if self._max_passes:
            at, index = self._find(self._entries[sequence.key])
            for block in self._blocks[:at]:
                block.num_passed += 1
            for entry in self._blocks[at].entries[:index]:
                entry.num_passed += 1
        self._remove(sequence)

    def _new_entry(self, sequence: Sequence, num_passed: int = 0) -> _Entry:
        self._keys.take(sequence)
        place = self._keys.of(sequence), sequence.key
        least_pages = _UNKNOWN if sequence.num_in_flight else self._least_pages(sequence)
        entry = self._entries[sequence.key] = _Entry(place, sequence, least_pages, num_passed)
        if sequence.request.has_bounds:
            self._bounded.add(sequence.key)
        if sequence.times.admitted_s is not None:
            self._begun[sequence.key] = sequence
        return entry

    def _known_pages(self, block: _EntryBlock, entry: _Entry) -> int:
        if entry.least_pages == _UNKNOWN:
            entry.least_pages = self._least_pages(entry.sequence)
            block.measure()
        return entry.least_pages

    def _add(self, entry: _Entry) -> None:
        if not self._blocks:
            self._blocks.append(_EntryBlock([entry]))
            return
        at = min(self._block_of(entry), len(self._blocks) - 1)
        block = self._blocks[at]
        block.add(entry)
        if len(block.entries) > _MAX_ENTRIES:
            self._blocks.insert(at + 1, block.split())

    def _remove(self, sequence: Sequence) -> int:
        entry = self._entries.pop(sequence.key)
        self._bounded.discard(sequence.key)
        self._begun.pop(sequence.key, None)
        at, index = self._find(entry)
        block = self._blocks[at]
        del block.entries[index]
        block.num_bounded -= entry.sequence.request.has_bounds
        if not block.entries:
            del self._blocks[at]
        elif self._max_passes:
            block.measure()
        return block.num_passed + entry.num_passed

    def _find(self, entry: _Entry) -> tuple[int, int]:
        at = self._block_of(entry)
        return at, bisect.bisect_left(self._blocks[at].entries, entry.place, key=_place)

    def _block_of(self, entry: _Entry) -> int:
        """Return the index of the first block that ends at or after the entry's place."""
        return bisect.bisect_left(self._blocks, entry.place, key=_last_place)

    def _may_be_passed(self, block: _EntryBlock, entry: _Entry) -> bool:
        return block.num_passed + entry.num_passed < self._max_passes


def _place(entry: _Entry) -> tuple[Any, int]:
    return entry.place


def _last_place(block: _EntryBlock) -> tuple[Any, int]:
    return block.entries[-1].place


def _waits_for_primary(sequence: Sequence, page_size: int) -> bool:
    primary = sequence.primary
    if primary is None or primary.phase in (Phase.CLOSING, Phase.FINISHED):
        return False
    shareable = num_shareable(sequence, page_size) * page_size
    return primary.phase is Phase.WAITING or primary.kv.num_computed < shareable
