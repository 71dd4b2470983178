"""Workers on devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
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
@dataclass(eq=False)
class DeviceHandle:
    """A `CellHandle` of calls on a device.

    Args:
      flags: uint8 [max_fused, batch], or [rows] of all tasks in sequence; None without tasks.
      emitted: for each emitted output [max_fused, batch, ...].
      reads: (array, the values of its first rows).
      copies: whether the host reads copies, which begin now; on a CPU it reads the arrays.
    """

    layout: CellLayout
    copies: InitVar[bool]
    tasks: TaskGroup | None
    flags: Any
    emitted: Sequence[Any]
    reads: Sequence[tuple[Any, list[int]]]

    def __post_init__(self, copies: bool) -> None:
        self._arrays = [array for array in (self.flags, *self.emitted) if array is not None]
        self._arrays += [array for array, _ in self.reads]
        for array in self._arrays if copies else ():
            array.copy_to_host_async()

    @property
    def has_news(self) -> bool:
        if self.reads or self.tasks is None:
            return True
        return self.layout.types[self.tasks.type].is_loop

    def is_ready(self) -> bool:
        return self._arrays[-1].is_ready()

    def collect(self) -> TaskResults:
        values = []
        for array, some in self.reads:
            values += zip(some, np.asarray(array), strict=False)
        tasks = self.tasks
        if tasks is None:
            return TaskResults(values=values)
        flags = np.asarray(self.flags)
        if flags.ndim == 1:
            bad = np.flatnonzero(flags & FINITE == 0)
            return TaskResults((), tasks.array[bad].tolist() if len(bad) else (), values)
        flags = flags[: len(tasks)]
        bad = np.argwhere(flags & FINITE == 0).tolist()
        not_finite = [tasks[number].nodes[row] for number, row in bad if row < tasks.sizes[number]]
        if not self.layout.types[tasks.type].is_loop:
            return TaskResults((), not_finite, values)
        ended = [
            frozenset(nodes[row[: len(nodes)] & ENDED != 0].tolist())
            for nodes, row in zip(tasks.arrays(), flags, strict=True)
        ]
        return TaskResults(ended, not_finite, values, self._steps(tasks, flags))

    def _steps(self, tasks: TaskGroup, flags: np.ndarray) -> list[tuple[int, np.ndarray]]:
        t, nodes = self.layout.types[tasks.type], tasks.array
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
        for name, array in zip(t.cell.emits, map(np.asarray, self.emitted), strict=True):
            output, emitted = t.cell.output_index[name], array[numbers, rows]
            values = (nodes[begins] * self.layout.stride + output).tolist()
            found += [
                (value, emitted[begin:end])
                for value, (begin, end) in zip(values, ranges, strict=True)
            ]
        return found


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
            # For each device: its pools, of which a function's result replaces what it was given,
            # and the parameters of each type.
            self._pools = [
                [
                    jnp.zeros((num, *spec.shape), spec.dtype, device=device)
                    for num, spec in zip(num_slots, self.layout.pools, strict=True)
                ]
                for device in devices
            ]
            self._params = [jax.device_put(self._programs.params, device) for device in devices]
        self._devices = devices
        self.num_workers = len(devices)
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
            is_flat = self._programs.is_flat[group.type]
            calls = _flat_calls(group) if is_flat else calls_of(group, self.layout, self._max_fused)
            handles += [self._launch(worker, some, size) for size, some in calls]
        return handles

    def read(self, worker: int, values: Sequence[int]) -> CellHandle:
        reads = self._read(worker, list(values))
        return DeviceHandle(self.layout, self._copies, None, None, (), reads)

    def check_integrity(self) -> None:
        self._table.check_integrity()

    def close(self) -> None:
        self._pools, self._params = [], []

    def warmup_steps(self) -> list[tuple[str, Callable[[], None]]]:
        """Return (name, function) of every executable; a call runs no task and changes no value."""
        steps: list[tuple[str, Callable[[], None]]] = []
        for worker in range(self.num_workers):
            place = f" on device {worker}" if self.num_workers > 1 else ""
            for t in self.layout.types:
                is_flat = self._programs.is_flat[t.index]
                for size in FLAT_SIZES if is_flat else t.cell.batch_sizes:
                    name = f"{t.cell.name}, {size} rows{place}"
                    steps.append((name, partial(self._warm_up, worker, t, size)))
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
        last: Any = self._counts[self._max_fused]
        if self._programs.is_flat[t.index]:
            rows[..., self.layout.first_output : self.layout.first_word] = NUM_RESERVED_SLOTS
            flat = rows.reshape(-1, self.layout.width)
            rows = self._flat_rows(flat, np.repeat(np.arange(self._max_fused), size))
            last = self._no_reads
        begin_s = time.perf_counter()
        self._call(0, t, rows, last)[0].block_until_ready()
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

    def _launch(self, worker: int, tasks: TaskGroup, size: int | None) -> CellHandle:
        """Submit a call with tasks of a size, or of any sizes (None) to `GatedTasks`."""
        t, nodes, sizes = self.layout.types[tasks.type], tasks.array, tasks.sizes
        self._write_constants(worker)
        own = self._read_and_written(worker, tasks)
        wanted: list[int] = []
        for node in nodes[self._is_wanted[nodes]].tolist():
            wanted += self._wanted[node]
        emitted: Any = ()
        reads: list[tuple[Any, list[int]]] = []
        if size is None:
            # The call reads the values that its tasks compute; `wanted` has no other values.
            some, slots = wanted[:NUM_READS], self._no_reads
            if some:
                slots = slots.copy()
                slots[: len(some)] = self._table.places_of(np.array(some))[1]
            rows = self._flat_rows(own, np.repeat(np.arange(len(sizes)), sizes))
            flags, values = self._call(worker, t, rows, slots)
            if some:
                reads, wanted = [(values, some)], wanted[NUM_READS:]
        else:
            rows = self._rows(t, size)
            rows[: len(tasks)][np.arange(size) < np.array(sizes)[:, None]] = own
            flags, emitted = self._call(worker, t, rows, self._counts[len(tasks)])
        if wanted:
            reads += self._read(worker, wanted)
        return DeviceHandle(self.layout, self._copies, tasks, flags, emitted, reads)

    def _read_and_written(self, worker: int, tasks: TaskGroup) -> np.ndarray:
        """Return what the nodes of tasks read and write, after fetching the values that are absent.

        Steps of a loop, and with several workers tasks, follow each other.
        """
        type, table, is_shared = tasks.type, self._table, self.num_workers > 1
        if not (is_shared or self.layout.types[type].is_loop):
            return table.rows_of(type, tasks.array)
        found = []
        for nodes in tasks.arrays():
            own = table.rows_of(type, nodes)
            if is_shared:
                for pool, slots in table.absent(worker, type, own):
                    self._fetch(worker, pool, slots)
                table.written(worker, type, own)
            found.append(own)
        return np.concatenate(found)

    def _flat_rows(self, own: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return padded rows and the numbers of their tasks, as `GatedTasks` take them."""
        rows = np.empty((bucket(len(own), FLAT_SIZES), self.layout.width + 1), np.int32)
        rows[: len(own), :-1] = own
        rows[: len(own), -1] = numbers
        rows[len(own) :, -1] = -1
        return rows

    def _call(self, worker: int, t: TypeLayout, rows: np.ndarray, last: Any) -> tuple[Any, Any]:
        """Call a type's function; return the flags, and what else it returns.

        Args:
          last: the last argument of `_Tasks` or `GatedTasks`.
        """
        mine, numbers = self._pools[worker], self._programs.pools[t.index]
        pools, flags, more = self._programs.calls[t.index](
            self._params[worker][t.index], tuple([mine[number] for number in numbers]), rows, last
        )
        for number, pool in zip(numbers, pools, strict=True):
            mine[number] = pool
        return flags, more

    def _read(self, worker: int, values: list[int]) -> list[tuple[Any, list[int]]]:
        """Start to read values, after copying absent ones; return (array, values of its rows)."""
        found = []
        pools, slots = self._table.places_of(np.array(values))
        for pool in set(pools.tolist()):
            mine = np.flatnonzero(pools == pool)
            if self.num_workers > 1:
                self._fetch(worker, pool, slots[mine])
            for begin in range(0, len(mine), COPY_SIZES[-1]):
                some = mine[begin : begin + COPY_SIZES[-1]]
                array = self._read_slots(worker, pool, slots[some])
                found.append((array, [values[number] for number in some.tolist()]))
        return found

    def _read_slots(self, worker: int, pool: int, slots: np.ndarray) -> jax.Array:
        return self._programs.read(self._pools[worker][pool], _padded(slots, ZERO_SLOT))

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
        if not self._constants or self.num_workers > 1:
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
        mine = self._pools[worker]
        values = jax.device_put(array, self._devices[worker])
        mine[pool] = self._programs.write(mine[pool], _padded(slots, TRASH_SLOT), values)

    def _warm_up(self, worker: int, t: TypeLayout, size: int) -> None:
        if self._programs.is_flat[t.index]:
            rows = np.full((size, self.layout.width + 1), -1, np.int32)
            self._call(worker, t, rows, self._no_reads)
        else:
            self._call(worker, t, self._rows(t, size), self._counts[0])

    def _warm_up_copies(self, worker: int, pool: int) -> None:
        mine = self._pools[worker]
        for size in COPY_SIZES:
            read = self._read_slots(worker, pool, np.full(size, ZERO_SLOT, np.int32))
            slots = np.full(size, TRASH_SLOT, np.int32)
            mine[pool] = self._programs.write(mine[pool], slots, read)


def _flat_calls(tasks: TaskGroup) -> list[tuple[None, TaskGroup]]:
    """Return the tasks of each call of `GatedTasks`, in order; a task fits in a call."""
    if len(tasks.array) <= FLAT_SIZES[-1]:
        return [(None, tasks)]
    calls: list[tuple[None, TaskGroup]] = []
    begin = num_rows = 0
    for number, size in enumerate(tasks.sizes):
        num_rows += size
        if num_rows > FLAT_SIZES[-1]:
            calls.append((None, tasks[begin:number]))
            begin, num_rows = number, size
    return [*calls, (None, tasks[begin:])]


def _padded(slots: np.ndarray, filler: int) -> np.ndarray:
    found = np.full(bucket(len(slots), COPY_SIZES), filler, np.int32)
    found[: len(slots)] = slots
    return found
