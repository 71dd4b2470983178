"""The slots of a worker's pools: which are free, and which value lies where."""

from __future__ import annotations

from typing import final

import numpy as np

from jaxserve.cells.layout import IN_TASK, NUM_RESERVED_SLOTS, ZERO_SLOT

# The slot of a value that a worker does not have.
ABSENT = -2
# Ids of values that stand for zeros and for constants that travel with the task.
ZERO_VALUE, WORDS_VALUE = 0, 1


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


@final
class WorkerSlots:
    """The slots of one worker.

    Attributes:
      of: int32 [values], the slot of each value; `ABSENT` if this worker does not have it.
      pools: the free slots of each pool.
    """

    def __init__(self, num_slots: tuple[int, ...]):
        self.pools = [FreeSlots(num) for num in num_slots]
        self.of = np.full(0, ABSENT, np.int32)

    def grow(self, num_values: int) -> None:
        """Make room for values with ids below `num_values`."""
        new = np.full(num_values, ABSENT, np.int32)
        new[: len(self.of)] = self.of
        new[ZERO_VALUE], new[WORDS_VALUE] = ZERO_SLOT, IN_TASK
        self.of = new

    def place(self, values: np.ndarray, pool: int) -> np.ndarray:
        """Take a slot of a pool for each value, and return the slots."""
        slots = self.of[values] = self.pools[pool].take(len(values))
        return slots

    def discard(self, values: np.ndarray, pools: np.ndarray) -> None:
        """Free the slots of values, of those that this worker has.

        Args:
          values: each once.
          pools: the pool of each.
        """
        slots = self.of[values]
        self.of[values] = ABSENT
        has = slots >= NUM_RESERVED_SLOTS
        if not has.all():
            slots, pools = slots[has], pools[has]
        for pool in set(pools.tolist()):
            self.pools[pool].free(slots[pools == pool])

    def discard_range(self, values: slice, pools: np.ndarray) -> None:
        """Free the slots of consecutive values, most of which this worker does not have.

        Args:
          pools: the pool of every value.
        """
        mine = self.of[values]
        held = np.flatnonzero(mine >= NUM_RESERVED_SLOTS)
        if held.size:
            slots, own = mine[held], pools[values][held]
            for pool in set(own.tolist()):
                self.pools[pool].free(slots[own == pool])
        mine[:] = ABSENT
