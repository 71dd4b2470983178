"""The free slots of a pool."""

from __future__ import annotations

from typing import final

import numpy as np

from jaxserve.cells.layout import NUM_RESERVED_SLOTS


@final
class FreeSlots:
    """A stack of the free slots of one pool, so that the slots freed last are taken first."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._slots = np.arange(NUM_RESERVED_SLOTS, num_slots, dtype=np.int32)
        self._num = len(self._slots)

    def __len__(self) -> int:
        return self._num

    @property
    def slots(self) -> np.ndarray:
        """The free slots."""
        return self._slots[: self._num]

    def take(self, num: int) -> np.ndarray:
        """Return slots, in the order in which they were freed.

        The caller has reserved them, see `ValueTable`.
        """
        assert num <= self._num, "slots are taken that were not reserved"
        self._num -= num
        return self._slots[self._num : self._num + num].copy()

    def free(self, slots: np.ndarray) -> None:
        self._slots[self._num : self._num + len(slots)] = slots
        self._num += len(slots)
