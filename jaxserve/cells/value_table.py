"""The values of all graphs that run: where each comes from, where it lies, who still takes it."""

from __future__ import annotations

from typing import final

import numpy as np

from jaxserve.cells.flat_graph import FIRST_KEPT, WORDS, FlatGraph
from jaxserve.cells.layout import NUM_RESERVED_SLOTS, TRASH_SLOT, Layout, TypeLayout
from jaxserve.cells.slots import ABSENT, WORDS_VALUE, ZERO_VALUE, WorkerSlots

_MANY = 1 << 30


@final
class ValueTable:
    """Turns tasks into slots. A value is `row * stride + output`, see `CellExecutor` for rows.

    Args:
      num_slots: slots of each pool, the same for each worker.
    """

    def __init__(self, layout: Layout, num_workers: int, num_slots: tuple[int, ...]):
        self._layout = layout
        self._stride = layout.stride
        self.workers = [WorkerSlots(num_slots) for _ in range(num_workers)]
        self._sources = np.zeros((0, layout.max_inputs), np.int32)
        self._words = np.zeros((0, max(1, layout.max_words)), np.int32)
        self._has_begun = np.zeros(0, np.bool_)  # of loops: a step was submitted
        self._uses = np.zeros(0, np.int32)
        self._pools = np.zeros(0, np.int8)
        self._grow(64)

    def add(self, graph: FlatGraph, first_row: int, kept_row: int) -> None:
        """See `CellExecutor.add`."""
        end = first_row + graph.num_rows
        if end > len(self._sources):
            self._grow(1 << (end - 1).bit_length())
        stride, codes = self._stride, graph.sources
        values = codes + first_row * stride
        values[codes < 0] = ZERO_VALUE
        values[codes == WORDS] = WORDS_VALUE
        if graph.kept:
            kept = np.array(graph.kept, np.int32) + kept_row * stride
            is_kept = codes <= FIRST_KEPT
            taken = kept[FIRST_KEPT - codes[is_kept]]
            values[is_kept] = taken
            np.add.at(self._uses, taken, 1)
        rows = slice(first_row, first_row + graph.num_nodes)
        self._sources[rows] = values
        self._words[rows] = graph.words
        self._has_begun[rows] = False
        ids = slice(first_row * stride, end * stride)
        self._uses[ids] = graph.uses
        self._pools[ids] = graph.pools

    def remove(self, graph: FlatGraph, first_row: int) -> None:
        """See `CellExecutor.remove`."""
        ids = slice(first_row * self._stride, (first_row + graph.num_rows) * self._stride)
        for worker in self.workers:
            worker.discard_range(ids, self._pools)

    def pools_of(self, values: np.ndarray) -> np.ndarray:
        return self._pools[values]

    def absent(self, worker: int, t: TypeLayout, nodes: np.ndarray) -> np.ndarray:
        """Return the values that nodes take and a worker does not have, each once.

        Those that other ones of these nodes compute are among them.
        """
        sources = self._sources[nodes, : t.num_inputs]
        return np.unique(sources[self.workers[worker].of[sources] == ABSENT])

    def fill(self, worker: int, t: TypeLayout, nodes: np.ndarray, rows: np.ndarray) -> None:
        """Write what a task's rows read and write, and take and free slots as of its submission.

        The worker has, or will have by then, all values that the nodes take.

        Args:
          nodes: int [n], of a loop those of one step.
          rows: int32 [rows of the type, batch]; the first n of each row are written.
        """
        num, slots = len(nodes), self.workers[worker]
        sources = self._sources[nodes, : t.num_inputs]
        found = slots.of[sources]
        rows[: t.num_inputs, :num] = found.T
        after_words = t.num_inputs + t.num_words
        if t.num_words:
            rows[t.num_inputs : after_words, :num] = self._words[nodes, : t.num_words].T
        if t.is_loop:
            self._fill_loop(slots, t, nodes, rows[after_words:])
            return
        self._release(sources)
        outputs = nodes * self._stride + np.arange(t.num_outputs)[:, None]
        rows[after_words:, :num] = self._place(slots, t.output_pools, outputs)

    def check_integrity(self) -> None:
        """Check that every slot is free or holds one value; see `CellExecutor`."""
        for number, worker in enumerate(self.workers):
            held = np.flatnonzero(worker.of >= NUM_RESERVED_SLOTS)
            for pool, free in enumerate(worker.pools):
                used = worker.of[held[self._pools[held] == pool]]
                slots = np.sort(np.concatenate([used, free.slots]))
                expected = np.arange(NUM_RESERVED_SLOTS, free.num_slots)
                assert np.array_equal(slots, expected), (
                    f"worker {number}, pool {pool}: {len(used)} slots hold values and "
                    f"{len(free)} are free, of {len(expected)}"
                )

    def _fill_loop(
        self, slots: WorkerSlots, t: TypeLayout, nodes: np.ndarray, rows: np.ndarray
    ) -> None:
        """Write the slots of outputs and of the flag; the first step takes them."""
        outputs = nodes * self._stride + np.arange(t.num_outputs + 1)[:, None]
        is_first = ~self._has_begun[nodes]
        if is_first.any():
            new = nodes[is_first]
            self._has_begun[new] = True
            done_pool = self._layout.done_pool
            assert done_pool is not None
            slots.of[outputs[:, is_first]] = self._place(
                slots, (*t.output_pools, done_pool), outputs[:, is_first]
            )
            for number, output in enumerate(t.carry):
                if output >= 0:
                    # From the second step on, the input is the output of the step before.
                    self._release(self._sources[new, number])
                    self._sources[new, number] = new * self._stride + output
        found = slots.of[outputs]
        num = len(nodes)
        rows[: t.num_outputs, :num] = found[:-1]
        rows[t.num_outputs, :num] = 2 * found[-1] + is_first

    def _release(self, sources: np.ndarray) -> None:
        """Count values as taken, and free the slots of those that nothing takes any more."""
        values = sources.T.ravel()
        uses = self._uses
        np.subtract.at(uses, values, 1)
        uses[ZERO_VALUE] = uses[WORDS_VALUE] = _MANY
        dead = values[uses[values] == 0]
        if not dead.size:
            return
        uses[dead] = -np.arange(1, len(dead) + 1)  # a value that was taken twice is there twice
        dead = dead[uses[dead] == -np.arange(1, len(dead) + 1)]
        uses[dead] = 0
        pools = self._pools[dead]
        for worker in self.workers:
            worker.discard(dead, pools)

    def _place(self, slots: WorkerSlots, pools: tuple[int, ...], outputs: np.ndarray) -> np.ndarray:
        """Take slots for outputs, and return them; those that nothing takes get the trash slot.

        Args:
          outputs: int [len(pools), n], the values.
        """
        is_taken = self._uses[outputs] > 0
        distinct = set(pools)
        if len(distinct) == 1 and is_taken.all():
            return slots.place(outputs.ravel(), pools[0]).reshape(outputs.shape)
        found = np.full(outputs.shape, TRASH_SLOT, np.int32)
        for pool in distinct:
            mine = is_taken & (np.array(pools) == pool)[:, None]
            if mine.any():
                found[mine] = slots.place(outputs[mine], pool)
        return found

    def _grow(self, num_rows: int) -> None:
        def grown(array: np.ndarray, num: int) -> np.ndarray:
            new = np.zeros((num, *array.shape[1:]), array.dtype)
            new[: len(array)] = array
            return new

        self._sources = grown(self._sources, num_rows)
        self._words = grown(self._words, num_rows)
        self._has_begun = grown(self._has_begun, num_rows)
        self._uses = grown(self._uses, num_rows * self._stride)
        self._pools = grown(self._pools, num_rows * self._stride)
        self._uses[[ZERO_VALUE, WORDS_VALUE]] = _MANY
        for worker in self.workers:
            worker.grow(num_rows * self._stride)
