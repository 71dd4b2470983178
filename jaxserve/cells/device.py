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
    IN_TASK,
    NUM_RESERVED_SLOTS,
    TRASH_SLOT,
    ZERO_SLOT,
    CellLayout,
    TypeLayout,
)
from jaxserve.cells.policy import Task, TaskGroup, groups_of
from jaxserve.cells.programs import (
    COPY_SIZES,
    ENDED,
    FINITE,
    FLAT_SIZES,
    NUM_READS,
    WAS_ENDED,
    CellPrograms,
)
from jaxserve.cells.value_table import ValueTable
from jaxserve.core.config import bucket
from jaxserve.execution.device_errors import out_of_memory_as


@final
class DeviceHandle:
    """A `CellHandle` of calls on a device.

    Args:
      flags: uint8 [max_fused, batch], or [rows] of all tasks in sequence; None without tasks.
      emitted: for each emitted output [max_fused, batch, ...].
      reads: (array, the values of its first rows).
      copies: whether the host reads copies, which begin now; on a CPU it reads the arrays.
    """

    def __init__(
        self,
        worker: int,
        tasks: TaskGroup | None,
        flags: Any,
        layout: CellLayout,
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


@final
class _Worker:
    """The arrays of one device. A function that gets a pool donates it; the result replaces it."""

    def __init__(self, device: Any, programs: CellPrograms, pools: Sequence[jax.Array]):
        self.device = device
        self.pools = list(pools)
        self.params = [jax.device_put(params, device) for params in programs.params]


@final
class DeviceCells:
    """A `CellExecutor` with one worker for each device.

    Args:
      layout: of `Cell` and `Repeat` objects.
      devices: JAX's devices; one worker runs on each.
      num_slots: slots of every pool on each device.
      max_fused: most tasks of one type and size that one call of an executable runs.

    Raises:
      DeviceMemoryError: the pools do not fit.
    """

    def __init__(
        self,
        layout: CellLayout,
        devices: Sequence[Any],
        *,
        num_slots: Sequence[int],
        max_fused: int = 5,
    ):
        self.layout = layout
        self._copies = any(device.platform != "cpu" for device in devices)
        self._programs = CellPrograms(self.layout, has_flat=not self._copies)
        self.num_slots = tuple(num - NUM_RESERVED_SLOTS for num in num_slots)
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
        # Large constants by pool and slot. A single worker writes them before its next tasks; with
        # several, each writes those that it reads.
        self._constants: dict[tuple[int, int], np.ndarray] = {}
        self._places: dict[
            int, list[tuple[int, int]]
        ] = {}  # large constants by the graph's first row
        self._wanted: dict[int, list[int]] = {}  # node -> values to read when it has run
        self._is_wanted = np.zeros(0, np.bool_)  # whether each node has any
        self._templates: dict[tuple[int, int], np.ndarray] = {}
        self._no_reads = np.full(NUM_READS, -1, np.int32)
        self._counts = [np.int32(num) for num in range(max_fused + 1)]

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    def add(self, graph: FlatGraph, first_row: int, kept_row: int = 0) -> None:
        stride = self.layout.stride
        self._table.add(graph, first_row, kept_row)
        end = first_row + graph.num_nodes
        if end > len(self._is_wanted):
            self._is_wanted = np.append(self._is_wanted, np.zeros(max(end, 64), np.bool_))
        if graph.constants:
            places = self._table.constant_places(graph, first_row)
            self._places[first_row] = places
            for place, (_, _, array) in zip(places, graph.constants, strict=True):
                self._constants[place] = array
        for node, value in graph.plan.returned.reads:
            self._wanted.setdefault(first_row + node, []).append(first_row * stride + value)
            self._is_wanted[first_row + node] = True

    def shrink(self, graph: FlatGraph, first_row: int, kept: Sequence[int]) -> None:
        self._forget_constants(first_row)
        self._table.shrink(graph, first_row, kept)

    def remove(self, graph: FlatGraph, first_row: int) -> None:
        stride = self.layout.stride
        self._forget_constants(first_row)
        self._table.remove(first_row)
        for value, _ in graph.wanted:
            if self._wanted.pop(first_row + value // stride, None):
                self._is_wanted[first_row + value // stride] = False

    def submit(self, worker: int, tasks: Sequence[Task]) -> list[CellHandle]:
        handles: list[CellHandle] = []
        for group in groups_of(tasks):
            if self._programs.flat[group.type] is not None:
                handles += [self._launch_flat(worker, some) for some in _flat_calls(group)]
                continue
            calls = calls_of(group, self.layout, self._max_fused)
            handles += [self._launch(worker, some, size) for size, some in calls]
        return handles

    def read(self, worker: int, values: Sequence[int]) -> CellHandle:
        reads = self._read(worker, list(values))
        return DeviceHandle(worker, None, None, self.layout, (), reads, copies=self._copies)

    def check_integrity(self) -> None:
        self._table.check_integrity()

    def close(self) -> None:
        self._workers = []

    def warmup_steps(self) -> list[tuple[str, Callable[[], None]]]:
        """Return (name, function) of every executable; a call runs no task and changes no value."""
        steps: list[tuple[str, Callable[[], None]]] = []
        for worker in range(len(self._workers)):
            place = f" on device {worker}" if len(self._workers) > 1 else ""
            for t in self.layout.types:
                is_flat = self._programs.flat[t.index] is not None
                warm_up = self._warm_up_flat if is_flat else self._warm_up
                for size in FLAT_SIZES if is_flat else t.cell.batch_sizes:
                    name = f"{t.cell.name}, {size} rows{place}"
                    steps.append((name, partial(warm_up, worker, t, size)))
            for pool, spec in enumerate(self.layout.pools):
                steps.append(
                    (f"copies of {spec}{place}", partial(self._warm_up_copies, worker, pool))
                )
        return steps

    def time_tasks(self, type: int, size: int) -> float:
        """Return the seconds of one task on the first device.

        The tasks run in one call, without nodes. Call it only while nothing else runs.
        """
        t = self.layout.types[type]
        rows = self._rows(t, size)
        # Equal rows would count as padding: slots and small constants take turns.
        rows[:, ::2, : t.num_inputs] = TRASH_SLOT
        rows[:, ::2, self.layout.first_word :] = 1
        for number, words in enumerate(t.words):
            if words is not None:
                rows[..., number] = IN_TASK
        if self._programs.flat[t.index] is not None:
            rows[..., self.layout.first_output : self.layout.first_word] = NUM_RESERVED_SLOTS
            flat = rows.reshape(-1, self.layout.width)
            rows = self._flat_rows(flat, np.repeat(np.arange(self._max_fused), size))
            begin_s = time.perf_counter()
            self._call_flat(0, t, rows, self._no_reads)[0].block_until_ready()
            return (time.perf_counter() - begin_s) / self._max_fused
        begin_s = time.perf_counter()
        self._call(0, t, rows, self._max_fused)[0].block_until_ready()
        return (time.perf_counter() - begin_s) / self._max_fused

    def _rows(self, t: TypeLayout, size: int) -> np.ndarray:
        """Return rows that read zeros and write to unread slots, for tasks of one size."""
        found = self._templates.get((t.index, size))
        if found is None:
            layout = self.layout
            found = np.full((self._max_fused, size, layout.width), ZERO_SLOT, np.int32)
            found[..., layout.first_output : layout.first_word] = TRASH_SLOT
            if t.is_loop:
                # The first step of a loop, in a row without a node.
                found[..., layout.flag] = 2 * TRASH_SLOT + 1
            self._templates[t.index, size] = found
        return found.copy()

    def _launch_flat(self, worker: int, tasks: TaskGroup) -> CellHandle:
        type, nodes, sizes = tasks.type, tasks.array, tasks.sizes
        t, table = self.layout.types[type], self._table
        self._write_constants(worker)
        own = table.rows_of(nodes)
        numbers = np.repeat(np.arange(len(sizes)), sizes)
        if len(self._workers) > 1:
            for some in np.split(own, np.cumsum(sizes)[:-1]):
                for pool, slots in table.absent(worker, type, some):
                    self._fetch(worker, pool, slots)
                table.written(worker, type, some)
        wanted: list[int] = []
        for node in nodes[self._is_wanted[nodes]].tolist():
            wanted += self._wanted[node]
        # The call reads the values that its tasks compute; `wanted` has no other values.
        some, slots = wanted[:NUM_READS], self._no_reads
        if some:
            slots = slots.copy()
            slots[: len(some)] = table.places_of(np.array(some))[1]
        flags, values = self._call_flat(worker, t, self._flat_rows(own, numbers), slots)
        reads = [(values, some)] if some else []
        if len(wanted) > NUM_READS:
            reads += self._read(worker, wanted[NUM_READS:])
        return DeviceHandle(worker, tasks, flags, self.layout, (), reads, copies=self._copies)

    def _flat_rows(self, own: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return padded rows and the numbers of their tasks, as a `FlatTaskFunction` takes them."""
        rows = np.empty((bucket(len(own), FLAT_SIZES), self.layout.width + 1), np.int32)
        rows[: len(own), :-1] = own
        rows[: len(own), -1] = numbers
        rows[len(own) :, -1] = -1
        return rows

    def _call_flat(
        self, worker: int, t: TypeLayout, rows: np.ndarray, reads: np.ndarray
    ) -> tuple[jax.Array, jax.Array]:
        mine = self._workers[worker]
        numbers, call = self._programs.pools[t.index], self._programs.flat[t.index]
        assert call is not None
        pools, flags, values = call(
            mine.params[t.index], tuple([mine.pools[number] for number in numbers]), rows, reads
        )
        for number, pool in zip(numbers, pools, strict=True):
            mine.pools[number] = pool
        return flags, values

    def _launch(self, worker: int, tasks: TaskGroup, size: int) -> CellHandle:
        type, nodes = tasks.type, tasks.array
        t, table = self.layout.types[type], self._table
        self._write_constants(worker)
        rows = self._rows(t, size)
        wanted: list[int] = []
        for number, some in enumerate(tasks.arrays()):
            own = rows[number, : len(some)]
            table.fill(type, some, own)
            if len(self._workers) > 1:
                for pool, slots in table.absent(worker, type, own):
                    self._fetch(worker, pool, slots)
                table.written(worker, type, own)
        for node in nodes[self._is_wanted[nodes]].tolist():
            wanted += self._wanted[node]
        flags, emitted = self._call(worker, t, rows, len(tasks))
        reads = self._read(worker, wanted) if wanted else []
        return DeviceHandle(worker, tasks, flags, self.layout, emitted, reads, copies=self._copies)

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
        """Start to read values, after copying absent ones; return (array, values of its rows)."""
        found = []
        pools, slots = self._table.places_of(np.array(values))
        for pool in set(pools.tolist()):
            mine = np.flatnonzero(pools == pool)
            if len(self._workers) > 1:
                self._fetch(worker, pool, slots[mine])
            for begin in range(0, len(mine), COPY_SIZES[-1]):
                some = mine[begin : begin + COPY_SIZES[-1]]
                array = self._read_slots(worker, pool, slots[some])
                found.append((array, [values[number] for number in some.tolist()]))
        return found

    def _read_slots(self, worker: int, pool: int, slots: np.ndarray) -> jax.Array:
        return self._programs.read(self._workers[worker].pools[pool], _padded(slots, ZERO_SLOT))

    def _fetch(self, worker: int, pool: int, slots: np.ndarray) -> None:
        holders = self._table.workers_with(pool, slots, worker)
        constants = slots[holders < 0]
        if len(constants):
            arrays = [self._constants[pool, slot] for slot in constants.tolist()]
            self._write_all(worker, pool, constants, arrays)
            self._table.copied(worker, pool, constants)
        for other in set(holders.tolist()) - {worker, -1}:
            there = slots[holders == other]
            for begin in range(0, len(there), COPY_SIZES[-1]):
                some = there[begin : begin + COPY_SIZES[-1]]
                self._write(worker, pool, some, self._read_slots(other, pool, some))
            self._table.copied(worker, pool, there)

    def _write_constants(self, worker: int) -> None:
        if not self._constants or len(self._workers) > 1:
            return
        of_pools: dict[int, list[tuple[int, np.ndarray]]] = {}
        for (pool, slot), array in self._constants.items():
            of_pools.setdefault(pool, []).append((slot, array))
        self._constants.clear()
        for pool, given in of_pools.items():
            slots, arrays = zip(*given, strict=True)
            self._write_all(worker, pool, np.array(slots), arrays)

    def _write_all(
        self, worker: int, pool: int, slots: np.ndarray, arrays: Sequence[np.ndarray]
    ) -> None:
        for begin in range(0, len(slots), COPY_SIZES[-1]):
            some = list(arrays[begin : begin + COPY_SIZES[-1]])
            padded = some + [some[0]] * (bucket(len(some), COPY_SIZES) - len(some))
            self._write(worker, pool, slots[begin : begin + len(some)], np.stack(padded))

    def _forget_constants(self, first_row: int) -> None:
        for place in self._places.pop(first_row, ()):
            self._constants.pop(place, None)

    def _write(self, worker: int, pool: int, slots: np.ndarray, array: Any) -> None:
        mine = self._workers[worker]
        mine.pools[pool] = self._programs.write(
            mine.pools[pool], _padded(slots, TRASH_SLOT), jax.device_put(array, mine.device)
        )

    def _warm_up(self, worker: int, t: TypeLayout, size: int) -> None:
        self._call(worker, t, self._rows(t, size), 0)

    def _warm_up_flat(self, worker: int, t: TypeLayout, size: int) -> None:
        rows = np.full((size, self.layout.width + 1), -1, np.int32)
        self._call_flat(worker, t, rows, self._no_reads)

    def _warm_up_copies(self, worker: int, pool: int) -> None:
        mine = self._workers[worker]
        for size in COPY_SIZES:
            read = self._read_slots(worker, pool, np.full(size, ZERO_SLOT, np.int32))
            mine.pools[pool] = self._programs.write(
                mine.pools[pool], np.full(size, TRASH_SLOT, np.int32), read
            )


def _flat_calls(tasks: TaskGroup) -> list[TaskGroup]:
    """Return the tasks of each `FlatTaskFunction` call, in order; a task fits in a call."""
    if len(tasks.array) <= FLAT_SIZES[-1]:
        return [tasks]
    calls: list[TaskGroup] = []
    begin = num_rows = 0
    for number, size in enumerate(tasks.sizes):
        num_rows += size
        if num_rows > FLAT_SIZES[-1]:
            calls.append(tasks[begin:number])
            begin, num_rows = number, size
    return [*calls, tasks[begin:]]


def _padded(slots: np.ndarray, filler: int) -> np.ndarray:
    found = np.full(bucket(len(slots), COPY_SIZES), filler, np.int32)
    found[: len(slots)] = slots
    return found
