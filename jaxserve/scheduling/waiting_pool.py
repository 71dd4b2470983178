"""Sequences that wait for a slot and memory."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import final

from jaxserve.scheduling.kv.prefix_cache import num_shareable
from jaxserve.scheduling.order_keys import OrderKeys
from jaxserve.scheduling.sequence import Phase, Sequence


@final
class WaitingPool:
    """Waiting sequences in the policy's order.

    A sequence that does not fit is passed by others as often as the order allows.

    Args:
      keys: of the sequences' places; a key is taken here whenever a sequence begins to wait.
      max_passes: see `Order`.
    """

    def __init__(self, keys: OrderKeys, max_passes: int, page_size: int):
        self._keys = keys
        self._max_passes = max_passes
        self._page_size = page_size
        self._sequences: list[Sequence] = []
        # Admissions that went before a sequence although it came first; 0 where it has no entry.
        self._num_passed: dict[Sequence, int] = {}
        # This many available pages are known to be too few for any waiting sequence.
        self._too_few_pages = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._sequences))

    def add(self, sequence: Sequence) -> None:
        """Take the sequence's key, and insert it there."""
        self._too_few_pages = 0
        self._keys.take(sequence)
        bisect.insort(self._sequences, sequence, key=self._keys.of)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended."""
        del self._sequences[self._index(sequence)]
        self._num_passed.pop(sequence, None)

    def replace(self, sequence: Sequence) -> None:
        """Take the key of one waiting sequence anew, because its answer or estimate has changed."""
        del self._sequences[self._index(sequence)]
        self.add(sequence)

    def sort(self) -> None:
        """Take every key anew, because limits or estimates have changed that the order goes by."""
        self._too_few_pages = 0
        for sequence in self._sequences:
            self._keys.take(sequence)
        self._sequences.sort(key=self._keys.of)

    def ready(self) -> Iterator[Sequence]:
        """Yield the sequences that could run at once if they fitted.

        A sequence whose tokens are still in flight ends the iteration, unless it may be passed.
        """
        for sequence in self._sequences:
            if sequence.num_in_flight:
                if not self._may_be_passed(sequence):
                    return
            elif not _waits_for_primary(sequence, self._page_size):
                yield sequence

    def first_that(
        self,
        fits: Callable[[Sequence], bool],
        awaits: Callable[[Sequence], bool],
        num_available: int,
    ) -> Sequence | None:
        """Return the first sequence that fits, if it may pass those before it.

        Args:
          fits: whether a sequence fits into `num_available` pages. Between its insertions into the
            pool only more available pages can make it fit; a reading that changes its reservation
            comes while its tokens are in flight, when it is not ready.
          awaits: whether a sequence fits but waits for something else; then any other may pass it.
        """
        if num_available <= self._too_few_pages:
            return None
        num_tried = 0
        for sequence in self.ready():
            if fits(sequence):
                if awaits(sequence):
                    continue
                return sequence
            if not self._may_be_passed(sequence):
                return None
            num_tried += 1
        if num_tried == len(self._sequences):
            self._too_few_pages = num_available
        return None

    def admit(self, sequence: Sequence) -> None:
        """Remove a sequence that runs from now on; those before it were passed."""
        at = self._index(sequence)
        for passed in self._sequences[:at]:
            self._num_passed[passed] = self._num_passed.get(passed, 0) + 1
        del self._sequences[at]
        self._num_passed.pop(sequence, None)

    def _index(self, sequence: Sequence) -> int:
        first = bisect.bisect_left(self._sequences, self._keys.of(sequence), key=self._keys.of)
        return self._sequences.index(sequence, first)

    def _may_be_passed(self, sequence: Sequence) -> bool:
        return self._num_passed.get(sequence, 0) < self._max_passes


def _waits_for_primary(sequence: Sequence, page_size: int) -> bool:
    primary = sequence.primary
    if primary is None or primary.phase in (Phase.CLOSING, Phase.FINISHED):
        return False
    shareable = num_shareable(sequence, page_size) * page_size
    return primary.phase is Phase.WAITING or primary.kv.num_computed < shareable
