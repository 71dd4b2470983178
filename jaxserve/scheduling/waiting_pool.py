"""Sequences that wait for a slot and memory."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import final

from jaxserve.scheduling.policy import Order
from jaxserve.scheduling.sequence import Phase, Sequence


@final
class WaitingPool:
    """In the policy's order. Who does not fit is passed by others as often as the order allows."""

    def __init__(self, order: Order, page_size: int):
        self._order = order
        self._page_size = page_size
        self._sequences: list[Sequence] = []
        # So many available pages are known to be too few for any of those that wait.
        self._too_few_pages = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._sequences))

    def add(self, sequence: Sequence) -> None:
        self._too_few_pages = 0
        bisect.insort(self._sequences, sequence, key=self._order.key)

    def remove(self, sequence: Sequence) -> None:
        """It has ended."""
        self._sequences.remove(sequence)

    def sort(self) -> None:
        """After limits have changed that the order may go by."""
        self._too_few_pages = 0
        self._sequences.sort(key=self._order.key)

    def ready(self) -> Iterator[Sequence]:
        """Those that could run at once if they fitted.

        Unless others may pass it, one whose tokens are still in flight is the end of them.
        """
        for sequence in self._sequences:
            if sequence.num_in_flight:
                if not self._may_be_passed(sequence):
                    return
            elif not _waits_for_leader(sequence, self._page_size):
                yield sequence

    def first_that(
        self,
        fits: Callable[[Sequence], bool],
        awaits: Callable[[Sequence], bool],
        num_available: int,
    ) -> Sequence | None:
        """The first that fits, if it may pass those before it.

        Args:
          fits: whether it does into `num_available` pages; more pages are no worse, and nothing
            else makes it fit later but its coming back into the pool.
          awaits: whether it fits but waits for something else; then anybody may pass it.
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
        """It runs from now on; those before it were passed."""
        at = self._sequences.index(sequence)
        for passed in self._sequences[:at]:
            passed.num_passed += 1
        del self._sequences[at]
        sequence.num_passed = 0

    def _may_be_passed(self, sequence: Sequence) -> bool:
        return sequence.num_passed < self._order.max_passes


def num_shareable(sequence: Sequence, page_size: int) -> int:
    """Full prompt pages, which samples of one request share; at least one token stays."""
    return (sequence.prompt_length - 1) // page_size


def _waits_for_leader(sequence: Sequence, page_size: int) -> bool:
    leader = sequence.leader
    if leader is None or leader.phase in (Phase.CLOSING, Phase.FINISHED):
        return False
    shareable = num_shareable(sequence, page_size) * page_size
    return leader.phase is Phase.WAITING or leader.num_computed < shareable
