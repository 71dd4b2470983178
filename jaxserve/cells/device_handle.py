"""Tasks in flight on a device, and their results as the host reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from jaxserve.cells.executor import TaskResults
from jaxserve.cells.gated import FINITE
from jaxserve.cells.layout import Layout
from jaxserve.cells.policy import TaskGroup
from jaxserve.cells.programs import ENDED, WAS_ENDED


@final
class DeviceHandle:
    """See `CellHandle`.

    Args:
      flags: uint8 [max_fused, batch], or of all rows one after the other; None without tasks.
      emitted: of each emitted output [max_fused, batch, ...].
      reads: (array, the values of its first rows).
      copies: whether the host reads copies, which begin now; on a CPU it reads the arrays.
    """

    def __init__(
        self,
        worker: int,
        tasks: TaskGroup | None,
        flags: Any,
        layout: Layout,
        emitted: Sequence[Any],
        reads: Sequence[tuple[Any, list[int]]],
        *,
        copies: bool,
    ):
        self.worker = worker
        self.tasks = tasks
        self._flags = flags
        self._layout = layout
        self._emitted = emitted
        self._reads = reads
        self._arrays = [array for array in (flags, *emitted) if array is not None]
        self._arrays += [array for array, _ in reads]
        for array in self._arrays if copies else ():
            array.copy_to_host_async()

    @property
    def has_news(self) -> bool:
        if self._reads or self.tasks is None:
            return True
        return self._layout.types[self.tasks.type].is_loop

    def is_ready(self) -> bool:
        return self._arrays[-1].is_ready()

    def collect(self) -> TaskResults:
        values = []
        for array, some in self._reads:
            values += zip(some, np.asarray(array), strict=False)
        tasks = self.tasks
        if tasks is None:
            return TaskResults(values=values)
        flags = np.asarray(self._flags)
        if flags.ndim == 1:
            bad = np.flatnonzero(flags & FINITE == 0)
            return TaskResults((), tasks.array[bad].tolist() if len(bad) else (), values)
        flags = flags[: len(tasks)]
        bad = np.argwhere(flags & FINITE == 0).tolist()
        not_finite = [tasks[number].nodes[row] for number, row in bad if row < tasks.sizes[number]]
        if not self._layout.types[tasks.type].is_loop:
            return TaskResults((), not_finite, values)
        ended = [
            frozenset(nodes[row[: len(nodes)] & ENDED != 0].tolist())
            for nodes, row in zip(tasks.arrays(), flags, strict=True)
        ]
        return TaskResults(ended, not_finite, values, self._steps(tasks, flags))

    def _steps(self, tasks: TaskGroup, flags: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Return the emitted outputs of each loop, of the steps before it had ended."""
        t, nodes = self._layout.types[tasks.type], tasks.array
        numbers = np.repeat(np.arange(len(tasks)), tasks.sizes)
        rows = np.concatenate([np.arange(size) for size in tasks.sizes])
        steps = np.flatnonzero(flags[numbers, rows] & WAS_ENDED == 0)
        steps = steps[np.argsort(nodes[steps], kind="stable")]
        if not len(steps):
            return []
        nodes, numbers, rows = nodes[steps], numbers[steps], rows[steps]
        begins = np.flatnonzero(np.diff(nodes, prepend=-1))
        ranges = list(zip(begins.tolist(), [*begins[1:].tolist(), len(nodes)], strict=True))
        found = []
        for name, array in zip(t.cell.emits, map(np.asarray, self._emitted), strict=True):
            output, emitted = t.cell.output_index[name], array[numbers, rows]
            values = (nodes[begins] * self._layout.stride + output).tolist()
            found += [
                (value, emitted[begin:end])
                for value, (begin, end) in zip(values, ranges, strict=True)
            ]
        return found
