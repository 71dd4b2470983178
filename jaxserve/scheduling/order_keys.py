"""The place of every sequence in the policy's order."""

from __future__ import annotations

from typing import Any, final

from jaxserve.scheduling.lengths.tracker import LengthTracker
from jaxserve.scheduling.policy import Order
from jaxserve.scheduling.sequence import Sequence


@final
class OrderKeys:
    """The sort key of every sequence that waits or runs, as the order gave it at one moment.

    The lists of waiting and of running sequences are sorted by these stored keys. So a reading that
    changes the expected length of a sequence never leaves a list unsorted; it counts when the
    sequence's key is taken next.
    """

    def __init__(self, order: Order, lengths: LengthTracker):
        self._order = order
        self._lengths = lengths
        self._keys: dict[int, Any] = {}

    def __len__(self) -> int:
        """Return the number of sequences with a key."""
        return len(self._keys)

    def take(self, sequence: Sequence) -> None:
        """Compute and store the key; a list that has the sequence must be sorted after this."""
        self._keys[sequence.key] = self._order.key(sequence, self._lengths)

    def of(self, sequence: Sequence) -> Any:
        """Return the stored key."""
        return self._keys[sequence.key]

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        del self._keys[sequence.key]
