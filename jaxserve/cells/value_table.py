"""The slots of all running graphs: which ones each node reads and writes, and where they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import numpy as np

from jaxserve.cells.flat_graph import FlatGraph
from jaxserve.cells.layout import IN_TASK, NUM_RESERVED_SLOTS, TRASH_SLOT, ZERO_SLOT, CellLayout


@final
class FreeSlots:
    """A stack of the free slots of one pool: the slots freed last are taken first."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._slots = np.arange(NUM_RESERVED_SLOTS, num_slots, dtype=np.int32)
        self._num = len(self._slots)

    def __len__(self) -> int:
        return self._num

    @property
    def slots(self) -> np.ndarray:
        return self._slots[: self._num]

    def take(self, num: int) -> np.ndarray:
        """Return slots, which the caller has reserved, in the order in which they were freed."""
        assert num <= self._num, "slots are taken that were not reserved"
        self._num -= num
        return self._slots[self._num : self._num + num].copy()

    def free(self, slots: np.ndarray) -> None:
        self._slots[self._num : self._num + len(slots)] = slots
        self._num += len(slots)


# The slots of the codes before those of a graph's own slots, see `GraphPlan`.
_RESERVED = np.array([ZERO_SLOT, TRASH_SLOT, IN_TASK], np.int32)
_NO_SLOTS = np.zeros(0, np.int32)


@final
class ValueTable:
    """Translates graphs into slots, and tasks into what their rows read and write.

    A graph takes its slots when it is added, the same on every worker. A value is `row * stride +
    output`, see `CellExecutor` for rows.

    Args:
      num_slots: slots of each pool, the same for each worker.
    """

    def __init__(self, layout: CellLayout, num_workers: int, num_slots: tuple[int, ...]):
        self._layout = layout
        self._num_workers = num_workers
        self._free = [FreeSlots(num) for num in num_slots]
        self._taken: dict[int, list[np.ndarray]] = {}  # first row of a graph -> slots of each pool
        # What each node reads and writes, see `CellLayout`; for loops, in the next step, and later.
        self._types = np.zeros(0, np.int32)
        self._rows = np.zeros((0, layout.width), np.int32)
        self._later = np.zeros((0, layout.width), np.int32)
        # For each pool and slot, the workers that have its value.
        self._has = [np.zeros((num, num_workers), np.bool_) for num in num_slots]
        for has in self._has:
            has[ZERO_SLOT] = True
        self._grow(64)

    def add(self, graph: FlatGraph, first_row: int, kept_row: int) -> None:
        layout, num = self._layout, graph.num_nodes
        end = first_row + num
        if end > len(self._rows):
            self._grow(1 << (end - 1).bit_length())
        taken = [
            free.take(some) if some else _NO_SLOTS
            for free, some in zip(self._free, graph.num_slots, strict=True)
        ]
        self._taken[first_row] = taken
        parts = [_RESERVED, *taken]
        if graph.kept:
            parts.append(self.places_of(np.array(graph.kept) + kept_row * layout.stride)[1])
        slots = np.concatenate(parts)
        self._types[first_row:end] = graph.plan.types
        rows = self._rows[first_row:end]
        rows[:, : layout.first_word] = slots.take(graph.plan.codes)
        rows[:, layout.first_word :] = graph.words
        if graph.plan.loops:
            self._add_loops(graph, first_row)

    def shrink(self, graph: FlatGraph, first_row: int, kept: Sequence[int]) -> None:
        layout = self._layout
        pools, slots = self.places_of(np.array(kept, np.int64) + first_row * layout.stride)
        taken = self._taken[first_row]
        for pool, some in enumerate(taken):
            stays = np.isin(some, slots[pools == pool])
            self._free[pool].free(some[~stays])
            taken[pool] = some[stays]

    def remove(self, first_row: int) -> None:
        for free, some in zip(self._free, self._taken.pop(first_row), strict=True):
            if len(some):
                free.free(some)

    def places_of(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows, outputs = np.divmod(values, self._layout.stride)
        pools = self._layout.output_pools[self._types[rows], outputs]
        return pools, self._rows[rows, self._layout.first_output + outputs]

    def constant_places(self, graph: FlatGraph, first_row: int) -> list[tuple[int, int]]:
        """Return (pool, slot) of a graph's large constants, which no worker has yet."""
        found = []
        for pool, code, _ in graph.constants:
            begin = len(_RESERVED) + sum(graph.num_slots[:pool])
            slot = int(self._taken[first_row][pool][code - begin])
            self._has[pool][slot] = False
            found.append((pool, slot))
        return found

    def rows_of(self, type: int, nodes: np.ndarray) -> np.ndarray:
        """Return what the nodes of a task read and write, int32 [n, width]; of loops, a step."""
        found = self._rows[nodes]
        if self._layout.types[type].is_loop:
            self._rows[nodes] = self._later[nodes]
        return found

    def absent(self, worker: int, type: int, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (pool, slots) that filled rows read and whose values a worker does not have."""
        t = self._layout.types[type]
        read = rows[:, : t.num_inputs]
        for pool in set(t.input_pools):
            slots = read[:, [one == pool for one in t.input_pools]].ravel()
            slots = slots[slots >= NUM_RESERVED_SLOTS]
            slots = np.unique(slots[~self._has[pool][slots, worker]])
            if slots.size:
                yield pool, slots

    def written(self, worker: int, type: int, rows: np.ndarray) -> None:
        """Record that only this worker has the values that filled rows write."""
        t, first = self._layout.types[type], self._layout.first_output
        for number, pool in enumerate(t.output_pools):
            slots = rows[:, first + number]
            self._has[pool][slots] = False
            self._has[pool][slots, worker] = True

    def workers_with(self, pool: int, slots: np.ndarray, worker: int) -> np.ndarray:
        """Return for each slot a worker that has its value: this one, the first one, or -1."""
        has = self._has[pool][slots]
        first = np.where(has.any(axis=1), has.argmax(axis=1), -1)
        return np.where(has[:, worker], worker, first)

    def copied(self, worker: int, pool: int, slots: np.ndarray) -> None:
        self._has[pool][slots, worker] = True

    def check_integrity(self) -> None:
        for pool, free in enumerate(self._free):
            used = [taken[pool] for taken in self._taken.values()]
            slots = np.sort(np.concatenate([*used, free.slots]))
            expected = np.arange(NUM_RESERVED_SLOTS, free.num_slots)
            assert np.array_equal(slots, expected), (
                f"pool {pool}: {sum(map(len, used))} slots are of graphs and {len(free)} are free, "
                f"of {len(expected)}"
            )

    def _add_loops(self, graph: FlatGraph, first_row: int) -> None:
        layout = self._layout
        for node in graph.plan.loops:
            row = self._rows[first_row + node]
            row[layout.flag] *= 2
            later = self._later[first_row + node]
            later[:] = row
            row[layout.flag] += 1
            for number, output in enumerate(layout.types[graph.graph.types[node]].carry):
                if output >= 0:
                    later[number] = row[layout.first_output + output]

    def _grow(self, num_rows: int) -> None:
        def grown(array: np.ndarray) -> np.ndarray:
            new = np.zeros((num_rows, *array.shape[1:]), array.dtype)
            new[: len(array)] = array
            return new

        self._types = grown(self._types)
        self._rows = grown(self._rows)
        if self._layout.done_pool is not None:
            self._later = grown(self._later)
