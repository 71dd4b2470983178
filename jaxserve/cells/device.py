"""Workers on devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.cells.executor import CellHandle, TaskResults, calls_of
from jaxserve.cells.flat_graph import FlatGraph
from jaxserve.cells.layout import (
    NUM_RESERVED_SLOTS,
    TRASH_SLOT,
    ZERO_SLOT,
    Layout,
    TypeLayout,
)
from jaxserve.cells.policy import Task
from jaxserve.cells.programs import COPY_SIZES, ENDED, FINITE, WAS_ENDED, CellPrograms
from jaxserve.cells.slots import ABSENT
from jaxserve.cells.value_table import ValueTable
from jaxserve.core.config import bucket
from jaxserve.execution.device_errors import out_of_memory_as


@final
class _Worker:
    """The arrays of one device. A function that gets a pool donates it, and the result follows."""

    def __init__(self, device: Any, programs: CellPrograms, pools: Sequence[jax.Array]):
        self.device = device
        self.pools = list(pools)
        self.params = [jax.device_put(params, device) for params in programs.params]


@final
class DeviceCells:
    """A `CellExecutor` with one worker a device.

    Args:
      layout: of `Cell` and `Repeat` objects.
      devices: JAX's devices; one worker runs on each.
      num_slots: slots of each pool on each device; as many of every pool.
      max_fused: most tasks of one type and size that one call of an executable runs.

    Raises:
      DeviceMemoryError: the pools do not fit.
    """

    def __init__(
        self,
        layout: Layout,
        devices: Sequence[Any],
        *,
        num_slots: Sequence[int],
        max_fused: int = 5,
    ):
        self.layout = layout
        self._programs = CellPrograms(self.layout)
        self.num_slots = np.array(num_slots) - NUM_RESERVED_SLOTS
        self._max_fused = max_fused
        with out_of_memory_as("allocating the slots of cells", "pass a smaller slot_memory"):
            self._workers = [
                _Worker(
                    device,
                    self._programs,
                    [
                        jnp.zeros((num, *spec.shape), spec.dtype, device=device)
                        for num, spec in zip(num_slots, self.layout.pools, strict=True)
                    ],
                )
                for device in devices
            ]
        self._table = ValueTable(self.layout, len(devices), tuple(num_slots))
        self._constants: dict[int, np.ndarray] = {}
        self._wanted: dict[int, list[int]] = {}  # node -> values to read when it has run
        self._templates: dict[tuple[int, int], np.ndarray] = {}
        self._counts = [np.int32(num) for num in range(max_fused + 1)]

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    def add(self, graph: FlatGraph, first_row: int, kept_row: int = 0) -> None:
        stride = self.layout.stride
        self._table.add(graph, first_row, kept_row)
        for number, (_, array) in enumerate(graph.constants, first_row + graph.num_nodes):
            self._constants[number * stride] = array
        for value, wanted in graph.wanted:
            node = value // stride
            is_loop = self.layout.types[graph.graph.types[node]].is_loop
            if not (wanted.is_steps or is_loop):
                values = self._wanted.setdefault(first_row + node, [])
                if first_row * stride + value not in values:
                    values.append(first_row * stride + value)

    def shrink(self, graph: FlatGraph, first_row: int, kept: Sequence[int]) -> None:
        self._table.shrink(graph, first_row, kept)

    def remove(self, graph: FlatGraph, first_row: int) -> None:
        stride = self.layout.stride
        self._table.remove(graph, first_row)
        for number in range(first_row + graph.num_nodes, first_row + graph.num_rows):
            del self._constants[number * stride]
        for value, _ in graph.wanted:
            self._wanted.pop(first_row + value // stride, None)

    def submit(self, worker: int, tasks: Sequence[Task]) -> list[CellHandle]:
        calls = calls_of(tasks, self.layout, self._max_fused)
        return [self._launch(worker, some, size) for size, some in calls]

    def read(self, worker: int, values: Sequence[int]) -> CellHandle:
        wanted = np.array(values)
        absent = wanted[self._table.workers[worker].of[wanted] == ABSENT]
        self._fetch(worker, absent)
        return _Handle(worker, (), None, self.layout, (), self._read(worker, list(values)))

    def check_integrity(self) -> None:
        self._table.check_integrity()

    def close(self) -> None:
        self._workers = []

    def warmup_steps(self) -> list[tuple[str, Callable[[], None]]]:
        """See `CompilingExecutor`; the functions run no task and change no value."""
        steps: list[tuple[str, Callable[[], None]]] = []
        for worker in range(len(self._workers)):
            place = f" on device {worker}" if len(self._workers) > 1 else ""
            for t in self.layout.types:
                for size in t.cell.batch_sizes:
                    name = f"{t.cell.name}, {size} rows{place}"
                    steps.append((name, partial(self._warm_up, worker, t, size)))
            for pool, spec in enumerate(self.layout.pools):
                steps.append(
                    (f"copies of {spec}{place}", partial(self._warm_up_copies, worker, pool))
                )
        return steps

    def time_tasks(self, type: int, size: int) -> float:
        """Return the seconds that a task of a compiled size takes on the first device, once.

        The tasks run in one call, and on no node. Call it while nothing else runs.
        """
        t = self.layout.types[type]
        rows = self._rows(t, size)
        begin_s = time.perf_counter()
        self._call(0, t, rows, self._max_fused)[0].block_until_ready()
        return (time.perf_counter() - begin_s) / self._max_fused

    def _rows(self, t: TypeLayout, size: int) -> np.ndarray:
        """Return rows that read zeros and write nothing that is read, for tasks of one size."""
        found = self._templates.get((t.index, size))
        if found is None:
            found = np.full((self._max_fused, t.num_rows, size), TRASH_SLOT, np.int32)
            found[:, : t.num_inputs + t.num_words] = ZERO_SLOT
            if t.is_loop:
                found[:, -1] = 2 * TRASH_SLOT + 1  # the first step of a loop without a node
            self._templates[t.index, size] = found
        return found.copy()

    def _launch(self, worker: int, tasks: Sequence[Task], size: int) -> CellHandle:
        t = self.layout.types[tasks[0].type]
        rows = self._rows(t, size)
        wanted: list[int] = []
        nodes = [np.array(task.nodes, np.int64) for task in tasks]
        if self._constants or len(self._workers) > 1:
            # Before any of the tasks frees a slot, since these copies run before all of them.
            self._fetch(worker, self._table.absent(worker, t, np.concatenate(nodes)))
        for number, task in enumerate(tasks):
            self._table.fill(worker, t, nodes[number], rows[number])
            if self._wanted:
                wanted += [value for node in task.nodes for value in self._wanted.get(node, ())]
        flags, emitted = self._call(worker, t, rows, len(tasks))
        reads = self._read(worker, wanted) if wanted else []
        return _Handle(worker, tasks, flags, self.layout, emitted, reads)

    def _call(self, worker: int, t: TypeLayout, rows: np.ndarray, num_tasks: int):
        mine = self._workers[worker]
        numbers = self._programs.pools[t.index]
        pools, flags, emitted = self._programs.tasks[t.index](
            mine.params[t.index],
            tuple([mine.pools[number] for number in numbers]),
            rows,
            self._counts[num_tasks],
        )
        for number, pool in zip(numbers, pools, strict=True):
            mine.pools[number] = pool
        return flags, emitted

    def _read(self, worker: int, values: list[int]) -> list[tuple[Any, list[int]]]:
        """Start to read values of a worker; return (array, the values of its first rows)."""
        found = []
        slots = self._table.workers[worker]
        pools = self._table.pools_of(np.array(values))
        for pool in set(pools.tolist()):
            mine = [value for value, one in zip(values, pools, strict=True) if one == pool]
            for begin in range(0, len(mine), COPY_SIZES[-1]):
                some = mine[begin : begin + COPY_SIZES[-1]]
                array = self._read_slots(worker, pool, slots.of[some])
                found.append((array, some))
        return found

    def _read_slots(self, worker: int, pool: int, slots: np.ndarray) -> jax.Array:
        return self._programs.read(self._workers[worker].pools[pool], _padded(slots, ZERO_SLOT))

    def _fetch(self, worker: int, values: np.ndarray) -> None:
        """Write to a worker's slots those of the values that are constants or on other workers."""
        pools = self._table.pools_of(values)
        for pool in np.unique(pools):
            mine = values[pools == pool]
            given = [value for value in mine.tolist() if value in self._constants]
            self._write(worker, pool, np.array(given, np.int64), self._constants_of(given))
            rest = np.array([v for v in mine.tolist() if v not in self._constants], np.int64)
            for other, slots in enumerate(self._table.workers):
                found = slots.of[rest]
                there = rest[found >= NUM_RESERVED_SLOTS]
                for begin in range(0, len(there) if other != worker else 0, COPY_SIZES[-1]):
                    some = there[begin : begin + COPY_SIZES[-1]]
                    array = self._read_slots(other, pool, slots.of[some])
                    self._write_some(worker, pool, some, array)
                rest = rest[found < NUM_RESERVED_SLOTS]

    def _constants_of(self, values: list[int]) -> np.ndarray:
        return np.stack([self._constants[value] for value in values]) if values else np.zeros(0)

    def _write(self, worker: int, pool: int, values: np.ndarray, arrays: np.ndarray) -> None:
        for begin in range(0, len(values), COPY_SIZES[-1]):
            part = slice(begin, begin + COPY_SIZES[-1])
            some = arrays[part]
            size = bucket(len(some), COPY_SIZES)
            padding = [(0, size - len(some)), *[(0, 0)] * (some.ndim - 1)]
            self._write_some(worker, pool, values[part], np.pad(some, padding))

    def _write_some(self, worker: int, pool: int, values: np.ndarray, array: Any) -> None:
        mine = self._workers[worker]
        slots = _padded(self._table.workers[worker].place(values, pool), TRASH_SLOT)
        mine.pools[pool] = self._programs.write(
            mine.pools[pool], slots, jax.device_put(array, mine.device)
        )

    def _warm_up(self, worker: int, t: TypeLayout, size: int) -> None:
        self._call(worker, t, self._rows(t, size), 0)

    def _warm_up_copies(self, worker: int, pool: int) -> None:
        mine = self._workers[worker]
        for size in COPY_SIZES:
            read = self._read_slots(worker, pool, np.full(size, ZERO_SLOT, np.int32))
            mine.pools[pool] = self._programs.write(
                mine.pools[pool], np.full(size, TRASH_SLOT, np.int32), read
            )


def _padded(slots: np.ndarray, filler: int) -> np.ndarray:
    """Return slots, with a filler up to a compiled size."""
    found = np.full(bucket(len(slots), COPY_SIZES), filler, np.int32)
    found[: len(slots)] = slots
    return found


@final
class _Handle:
    """See `CellHandle`.

    Args:
      flags: uint8 [max_fused, batch]; None without tasks.
      emitted: of each emitted output [max_fused, batch, ...].
      reads: (array, the values of its first rows).
    """

    def __init__(
        self,
        worker: int,
        tasks: Sequence[Task],
        flags: Any,
        layout: Layout,
        emitted: Sequence[Any],
        reads: Sequence[tuple[Any, list[int]]],
    ):
        self.worker = worker
        self.tasks = tasks
        self._flags = flags
        self._layout = layout
        self._emitted = emitted
        self._reads = reads
        self._arrays = [array for array in (flags, *emitted) if array is not None]
        self._arrays += [array for array, _ in reads]
        for array in self._arrays:
            array.copy_to_host_async()

    def is_ready(self) -> bool:
        return self._arrays[-1].is_ready()

    def collect(self) -> TaskResults:
        values = []
        for array, some in self._reads:
            values += zip(some, np.asarray(array), strict=False)
        if self._flags is None:
            return TaskResults((), values=values)
        flags = np.asarray(self._flags)
        t = self._layout.types[self.tasks[0].type]
        not_finite: list[int] = []
        for task, row in zip(self.tasks, flags, strict=False):
            bad = np.flatnonzero(row[: len(task.nodes)] & FINITE == 0)
            not_finite += [task.nodes[index] for index in bad.tolist()]
        if not t.is_loop:
            return TaskResults((frozenset(),) * len(self.tasks), not_finite, values)
        emitted = [np.asarray(array) for array in self._emitted]
        ended, steps = [], []
        outputs = [t.cell.output_index[name] for name in t.cell.emits]
        for number, (task, row) in enumerate(zip(self.tasks, flags.tolist(), strict=False)):
            pairs = list(zip(task.nodes, row, strict=False))
            ended.append(frozenset(node for node, flag in pairs if flag & ENDED))
            for index, (node, flag) in enumerate(pairs):
                if flag & WAS_ENDED:
                    continue
                for output, arrays in zip(outputs, emitted, strict=True):
                    steps.append((node * self._layout.stride + output, arrays[number, index]))
        return TaskResults(ended, not_finite, values, steps)
