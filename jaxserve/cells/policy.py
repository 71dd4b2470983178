"""The protocols of scheduling policies for cells: which nodes run next, together, and where."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, repeat
from typing import Protocol, final, overload

import numpy as np

from jaxserve.cells.cell_graph import CellGraph


@final
@dataclass(frozen=True)
class CellType:
    """A cell type as a policy sees it; types are numbered in the order of a runtime's cells.

    Attributes:
      batch_sizes: compiled sizes, increasing; the last is the largest batch.
      is_loop: whether its nodes run several steps, until the executor says that they have ended.
    """

    name: str
    priority: int = 0
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    is_loop: bool = False

    @property
    def max_batch(self) -> int:
        return self.batch_sizes[-1]

    @property
    def min_batch(self) -> int:
        return self.batch_sizes[0]


@final
@dataclass(frozen=True, slots=True)
class Task:
    """Nodes of one type that run together on one worker.

    A loop stays on the worker of its first step.

    Attributes:
      type: index of the cell type.
      nodes: their ids, at most the type's largest batch. A loop's node is in one task for each of
        its steps. A task of padding alone has none.
      worker: index of the worker. A worker runs its tasks in the order of their submission.
      num_padding: rows that are computed without a node, as with padding to a common length.
    """

    type: int
    nodes: Sequence[int]
    worker: int
    num_padding: int = 0


@final
class TaskGroup(Sequence[Task]):
    """Consecutive tasks of one type on one worker. Treat it as immutable.

    Its tasks are created on demand: code that handles all of them at once needs none.

    Attributes:
      array: int64 [nodes], the nodes of the tasks, those of the first task first.
      sizes: the number of nodes of each task.
      num_rows: of each task, its nodes and its padding.
    """

    __slots__ = ("type", "worker", "array", "sizes", "num_rows", "_tasks")

    def __init__(
        self,
        type: int,
        worker: int,
        array: np.ndarray,
        sizes: Sequence[int],
        *,
        num_rows: Sequence[int] | None = None,
        tasks: Sequence[Task] | None = None,
    ):
        self.type = type
        self.worker = worker
        self.array = array
        self.sizes = sizes
        self.num_rows = sizes if num_rows is None else num_rows
        self._tasks = tasks

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> TaskGroup:
        """Return a group that keeps these tasks, one or more of one type and worker."""
        first, sizes = tasks[0], [len(task.nodes) for task in tasks]
        nodes = np.array([node for task in tasks for node in task.nodes], np.int64)
        num_rows = [len(task.nodes) + task.num_padding for task in tasks]
        return cls(first.type, first.worker, nodes, sizes, num_rows=num_rows, tasks=tasks)

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> TaskGroup: ...
    def __getitem__(self, index: int | slice) -> Task | TaskGroup:
        """Return a task, or the tasks of a slice without gaps as a group."""
        if isinstance(index, int):
            return self._made()[index]
        begin, end, step = index.indices(len(self))
        if step != 1:
            raise IndexError(f"a group of tasks was given a slice of step {step}; pass one of 1")
        first = sum(self.sizes[:begin])
        return TaskGroup(
            self.type,
            self.worker,
            self.array[first : first + sum(self.sizes[begin:end])],
            self.sizes[begin:end],
            num_rows=self.num_rows[begin:end],
            tasks=None if self._tasks is None else self._tasks[begin:end],
        )

    def arrays(self) -> list[np.ndarray]:
        ends = list(accumulate(self.sizes))
        return [self.array[end - size : end] for size, end in zip(self.sizes, ends, strict=True)]

    def _made(self) -> Sequence[Task]:
        if self._tasks is None:
            self._tasks = [
                Task(self.type, nodes.tolist(), self.worker, num - len(nodes))
                for nodes, num in zip(self.arrays(), self.num_rows, strict=True)
            ]
        return self._tasks


def groups_of(tasks: Sequence[Task]) -> list[TaskGroup]:
    """Return tasks of one worker in groups of consecutive tasks of one type."""
    if isinstance(tasks, TaskGroup):
        return [tasks]
    return [TaskGroup.of(list(some)) for _, some in groupby(tasks, lambda task: task.type)]


def with_ended(
    tasks: Sequence[Task], ended: Sequence[Collection[int]]
) -> Iterable[tuple[Task, Collection[int]]]:
    """Return each task of `CellScheduler.complete` with its nodes that have ended."""
    return zip(tasks, ended or repeat(()), strict=bool(ended))


class CellScheduler(Protocol):
    """The running state of a policy: it chooses tasks, and records which nodes have run.

    One thread drives it. Ids of nodes are `first_node + number in the graph`. They are reused when
    their graph has left and no submitted task has them.
    """

    def add(self, key: int, graph: CellGraph, first_node: int, now_s: float) -> None:
        """Add a graph, whose inputs from outside are all available.

        Args:
          key: names the graph until it has finished, or was cancelled.
          first_node: the id of its node 0. Its nodes have consecutive ids.
          now_s: the time of its arrival.

        Raises:
          InvalidGraphError: the policy does not schedule such graphs. Nothing was added, and the
            request ends with the error.
        """
        ...

    def cancel(self, key: int) -> None:
        """Drop a graph; its nodes are in no task from now on.

        Submitted tasks with its nodes still run, and are completed as usual.
        """
        ...

    def schedule(self, worker: int, now_s: float) -> Sequence[Task]:
        """Return the tasks to submit to a worker now, in this order; none if nothing should run.

        It is called when the worker has room for more. Nodes of a later task may depend on nodes of
        an earlier one, and on those of earlier tasks of this worker.
        """
        ...

    def complete(self, tasks: Sequence[Task], ended: Sequence[Collection[int]] = ()) -> list[int]:
        """Record that tasks have run; return the keys of the graphs that finished with them.

        Each worker's tasks are completed in the order of their submission. The tasks are of one
        type and worker, and `schedule` returned them together.

        Args:
          ended: for each task, its nodes of loops that end with this step, or ended before it; see
            `with_ended`. It is empty if they are no loops.

        Returns:
          Keys of graphs whose nodes have all run, or that the policy held back until now, except
            cancelled graphs. Steps of loops that ended may still be submitted.
        """
        ...

    @property
    def has_work(self) -> bool:
        """Whether any added graph has not left."""
        ...

    @property
    def wake_s(self) -> float | None:
        """The time at which `schedule` may return tasks although no event occurs before; or None.

        It is used only while no task is running.
        """
        ...


class CellPolicy(Protocol):
    """A policy: its settings, which make schedulers."""

    @property
    def name(self) -> str: ...

    def new_scheduler(self, types: Sequence[CellType], num_workers: int) -> CellScheduler: ...
