"""Simulation of cells: the real policy and engine; simulated cells, workers and clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, final

import numpy as np

from jaxserve.cells.answers import CellAnswer, CellCompletion
from jaxserve.cells.base import BATCH_SIZES, BaseCell
from jaxserve.cells.engine import CellEngine, CellStats
from jaxserve.cells.executor import CellHandle, TaskResults, calls_of
from jaxserve.cells.flat_graph import FlatGraph, flatten
from jaxserve.cells.graph import MAX_NODES, Graph, Node
from jaxserve.cells.layout import CellLayout
from jaxserve.cells.policy import CellPolicy, Task, TaskGroup
from jaxserve.cells.values import HasShape, ValueSpec
from jaxserve.core.clock import VirtualClock
from jaxserve.core.errors import InvalidConfigError
from jaxserve.engine.recorder import Records

# (graph, node) -> steps after which a loop's node ends.
LoopLength: TypeAlias = "Callable[[FlatGraph, int], int]"
_MANY_SLOTS = 1 << 40


@final
class SimulatedCell(BaseCell):
    """A cell that only has a signature; the cost of a `SimulatedCells` says how long it takes.

    Args:
      name: also the identity of its type.
      inputs, outputs: without the batch axis.
      is_loop: whether a node runs several steps; pass the most of them as `max_steps` in its call.
      priority, batch_sizes: see `BaseCell`.
    """

    def __init__(
        self,
        name: str,
        inputs: Mapping[str, HasShape],
        outputs: Mapping[str, HasShape],
        *,
        priority: int = 0,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        is_loop: bool = False,
    ):
        super().__init__(
            ("simulated", name),
            name,
            {key: ValueSpec.of(value) for key, value in inputs.items()},
            {key: ValueSpec.of(value) for key, value in outputs.items()},
            priority=priority,
            batch_sizes=batch_sizes,
            is_loop=is_loop,
            ends_by_itself=is_loop,
        )

    def __call__(self, *only: Any, max_steps: int = 1, **inputs: Any) -> Node:
        return Node(self, self.bind(self._named(only, inputs) if only else inputs), max_steps)


class TaskCost(Protocol):
    """A cost of tasks, in seconds."""

    def task_s(self, cell: str, batch: int) -> float:
        """Return the seconds that a device needs for a task, by the cell's name and its rows."""
        ...

    def host_s(self, num_tasks: int) -> float:
        """Return the seconds that the host needs to schedule and submit tasks together."""
        ...


@final
class SimulatedCells:
    """A `CellExecutor` that runs tasks in virtual time and checks that they may run.

    Args:
      layout: of cells of any kind; their modules are not used.
      cost: how long tasks take.
      max_fused: most tasks of one type and size that one call runs, as of a `CellRuntime` with this
        `max_tasks_to_submit`. Their results are available when the last of them has run.
      loop_length: when loops end; by default at their `max_steps`.

    Raises:
      AssertionError: by `submit`, if a task is too large, or a node of another type, runs twice, or
        runs on a worker without its dependencies.
    """

    def __init__(
        self,
        layout: CellLayout,
        clock: VirtualClock,
        cost: TaskCost,
        *,
        num_workers: int = 1,
        max_fused: int = 5,
        loop_length: LoopLength | None = None,
    ):
        self.layout = layout
        self._max_fused = max_fused
        self.num_workers = num_workers
        self.num_slots = (_MANY_SLOTS,) * len(layout.pools)
        self._clock = clock
        self._cost = cost
        self._loop_length = loop_length
        self._free_at_s = [0.0] * num_workers
        self._graphs: dict[int, tuple[FlatGraph, int]] = {}  # node -> its graph, first row
        # Node -> the steps that were submitted, their worker, and whether it was collected.
        self._steps: dict[int, int] = {}
        self._worker_of: dict[int, int] = {}
        self._has_run: set[int] = set()

    def add(self, graph: FlatGraph, first_row: int, kept_row: int = 0) -> None:
        for node in range(first_row, first_row + graph.num_nodes):
            assert node not in self._graphs, f"node {node} is used twice"
            self._has_run.discard(node)
            self._graphs[node] = graph, first_row

    def shrink(self, graph: FlatGraph, first_row: int, kept: Sequence[int]) -> None:
        """Do nothing: there are no slots."""

    def remove(self, graph: FlatGraph, first_row: int) -> None:
        for node in range(first_row, first_row + graph.num_nodes):
            del self._graphs[node]
            self._steps.pop(node, None)
            self._worker_of.pop(node, None)

    def submit(self, worker: int, tasks: Sequence[Task]) -> list[CellHandle]:
        self._clock.advance_to(self._clock.now() + self._cost.host_s(len(tasks)))
        calls = calls_of(tasks, self.layout, self._max_fused)
        return [self._launch(worker, some, size) for size, some in calls]

    def read(self, worker: int, values: Sequence[int]) -> CellHandle:
        arrays = [(value, self._array(value)) for value in values]
        results = TaskResults(values=arrays)
        ready_s = max(self._free_at_s[worker], self._clock.now())
        return _Handle(None, results, ready_s, self._clock, lambda: None)

    def check_integrity(self) -> None:
        """Do nothing: there are no slots."""

    def close(self) -> None:
        self._graphs.clear()

    def _launch(self, worker: int, tasks: TaskGroup, size: int) -> CellHandle:
        cell = self.layout.types[tasks.type].cell
        ended: list[frozenset[int]] = []
        values: list[int] = []
        run: list[int] = []
        for task in tasks:
            ended_now, wanted = self._run_task(worker, task)
            ended.append(frozenset(ended_now))
            values += wanted
            run += [node for node in task.nodes if not cell.is_loop or node in ended_now]
        begin_s = max(self._free_at_s[worker], self._clock.now())
        ready_s = self._free_at_s[worker] = begin_s + len(tasks) * self._cost.task_s(
            cell.name, size
        )
        self._clock.expect(ready_s)
        results = TaskResults(ended, values=[(value, self._array(value)) for value in values])
        return _Handle(tasks, results, ready_s, self._clock, lambda: self._has_run.update(run))

    def _run_task(self, worker: int, task: Task) -> tuple[list[int], list[int]]:
        cell = self.layout.types[task.type].cell
        num_rows = len(task.nodes) + task.num_padding
        assert 0 < num_rows <= cell.batch_sizes[-1], f"a task has {num_rows} rows"
        assert task.worker == worker, f"a task for worker {task.worker} is given to {worker}"
        values, ended = [], []
        for node in task.nodes:
            self._run(node, task)
            graph, first = self._graphs[node]
            number = node - first
            steps = self._steps[node]
            most = graph.graph.max_steps[number]
            length = self._loop_length(graph, number) if self._loop_length else most
            if cell.is_loop and steps >= length:
                ended.append(node)
            if not cell.is_loop:
                wanted = {
                    value for value, _ in graph.wanted if value // self.layout.stride == number
                }
                values += [value + first * self.layout.stride for value in wanted]
        return ended, values

    def _run(self, node: int, task: Task) -> None:
        assert node in self._graphs, f"node {node} of a graph that has left is in {task}"
        graph, first = self._graphs[node]
        number = node - first
        assert graph.graph.types[number] == task.type, f"node {node} is not of the type of {task}"
        self._steps[node] = self._steps.get(node, 0) + 1
        assert self._steps[node] <= graph.graph.max_steps[number], f"node {node} runs too often"
        worker = self._worker_of.setdefault(node, task.worker)
        assert worker == task.worker, f"the loop of node {node} moves from worker {worker}"
        for before in graph.graph.predecessors[number]:
            other = first + before
            is_there = other in self._has_run or (
                self._worker_of.get(other) == task.worker
                and not self.layout.types[graph.graph.types[before]].is_loop
            )
            assert is_there, f"node {node} runs before node {other}, on which it depends"

    def _array(self, value: int) -> np.ndarray:
        graph, first = self._graphs[value // self.layout.stride]
        pool = graph.pool_of(value - first * self.layout.stride, self.layout)
        spec = self.layout.pools[pool]
        return np.zeros(spec.shape, spec.dtype)


@final
@dataclass(eq=False)
class _Handle:
    tasks: TaskGroup | None
    results: TaskResults
    ready_s: float
    clock: VirtualClock
    on_collect: Callable[[], None]
    has_news = True

    def is_ready(self) -> bool:
        return self.clock.now() >= self.ready_s

    def collect(self) -> TaskResults:
        self.clock.advance_to(self.ready_s)
        self.on_collect()
        return self.results


@final
@dataclass(frozen=True)
class MeasuredTaskCost:
    """A cost from the seconds of each cell's compiled sizes.

    Attributes:
      seconds: name of the cell -> batch size -> seconds of a task. Other sizes are interpolated.
      host_per_call_s, host_per_task_s: seconds of the host for tasks that are submitted together.
    """

    seconds: Mapping[str, Mapping[int, float]]
    host_per_call_s: float = 0.0
    host_per_task_s: float = 0.0

    def task_s(self, cell: str, batch: int) -> float:
        sizes = self.seconds[cell]
        if batch in sizes:
            return sizes[batch]
        known = sorted(sizes)
        return float(np.interp(batch, known, [sizes[size] for size in known]))

    def host_s(self, num_tasks: int) -> float:
        return self.host_per_call_s + num_tasks * self.host_per_task_s


@final
@dataclass(frozen=True, kw_only=True)
class CellSimulation:
    """The result of a simulation. Times are virtual seconds from the start of the run.

    Attributes:
      completions: in the order of the requests; the values have no meaning.
      wall_s: end of the last request.
    """

    completions: tuple[CellCompletion, ...]
    wall_s: float
    records: Records
    stats: CellStats


def simulate_cells(
    layout: CellLayout,
    requests: Sequence[tuple[float, Graph]],
    policy: CellPolicy,
    cost: TaskCost,
    *,
    num_workers: int = 1,
    max_in_flight: int = 2,
    max_tasks_to_submit: int = 5,
    loop_length: LoopLength | None = None,
) -> CellSimulation:
    """Simulate requests under a policy, without a device, with the engine that serves on devices.

    Args:
      requests: (arrival in seconds, graph), in the order of their arrivals. A graph is used once.
      num_workers, max_in_flight: as of a `CellRuntime`.
      max_tasks_to_submit: most tasks of one type and size that one call runs, as of a
        `CellRuntime`; pass the policy's own.
      loop_length: when loops end; by default at their `max_steps`.

    Raises:
      InvalidCellError: two cells have one name.
      InvalidConfigError: an option is not allowed.
    """
    layout.require_names()
    for name, value in (
        ("num_workers", num_workers),
        ("max_in_flight", max_in_flight),
        ("max_tasks_to_submit", max_tasks_to_submit),
    ):
        if value < 1:
            raise InvalidConfigError(f"{name}={value} is not allowed; pass at least 1")
    clock = VirtualClock()
    executor = SimulatedCells(
        layout,
        clock,
        cost,
        num_workers=num_workers,
        max_fused=max_tasks_to_submit,
        loop_length=loop_length,
    )
    engine = CellEngine(executor, policy, clock, max_in_flight=max_in_flight, max_nodes=MAX_NODES)
    answers = [
        CellAnswer(f"{number}", flatten(graph, layout, max_nodes=MAX_NODES), arrival_s)
        for number, (arrival_s, graph) in enumerate(requests)
    ]
    arrivals = [arrival_s for arrival_s, _ in requests]
    for arrival_s in arrivals:
        clock.expect(arrival_s)
    num_arrived = 0
    while num_arrived < len(answers) or engine.has_work:
        while num_arrived < len(answers) and arrivals[num_arrived] <= clock.now():
            engine.begin(answers[num_arrived])
            num_arrived += 1
        next_s = arrivals[num_arrived] if num_arrived < len(answers) else None
        wake_s = engine.idle_until_s if engine.has_work else next_s
        if wake_s is not None and wake_s > clock.now():
            clock.advance_to(wake_s if next_s is None else min(wake_s, next_s))
            continue
        engine.step()
    completions = tuple(answer.future.result() for answer in answers)
    return CellSimulation(
        completions=completions,
        wall_s=max((c.timing.finished_s or 0.0 for c in completions), default=0.0),
        records=engine.recorder.records,
        stats=engine.stats,
    )
