"""The protocols of scheduling policies for cells: which nodes run next, together, and where."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np

from jaxserve.cells.cell_graph import CellGraph


@final
@dataclass(frozen=True)
class CellType:
    """What a policy knows of a cell type; types are numbered in the order of a runtime's cells.

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
class Task:
    """Nodes of one type that run together on one worker. Treat it as immutable.

    A loop stays on the worker of its first step.

    Attributes:
      type: index of the cell type.
      nodes: their ids, at most the type's largest batch. A loop's node is in one task for each of
        its steps. A task of padding alone has none.
      worker: index of the worker. A worker runs its tasks in the order of their submission.
      num_padding: rows that are computed and belong to no node, as with padding to a common length.
      array: int64 [nodes], `nodes` as an array.
    """

    __slots__ = ("type", "nodes", "worker", "num_padding", "array")

    def __init__(
        self,
        type: int,
        nodes: Sequence[int],
        worker: int,
        num_padding: int = 0,
        *,
        array: np.ndarray | None = None,
    ):
        self.type = type
        self.nodes = nodes
        self.worker = worker
        self.num_padding = num_padding
        self.array = np.array(nodes, np.int64) if array is None else array

    def __repr__(self) -> str:
        return f"Task(type={self.type}, nodes={list(self.nodes)}, worker={self.worker})"


def nodes_of(tasks: Sequence[Task]) -> np.ndarray:
    """Return the nodes of at least one task, int64 [nodes], those of the first task first."""
    return tasks[0].array if len(tasks) == 1 else np.concatenate([one.array for one in tasks])


class CellScheduler(Protocol):
    """A policy at work: it chooses tasks, and knows which nodes have run.

    It is driven by one thread. Ids of nodes are `first_node + number in the graph`. They are used
    again when their graph has left and no submitted task has them.
    """

    def add(self, key: int, graph: CellGraph, first_node: int, now_s: float) -> None:
        """Add a graph, whose inputs from outside of it are all there.

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

        Tasks that have been submitted with its nodes run, and are completed as the others are.
        """
        ...

    def schedule(self, worker: int, now_s: float) -> list[Task]:
        """Return the tasks to submit to a worker now, in this order; none if nothing should run.

        It is called when the worker has room for more. Nodes of a later task may depend on nodes of
        an earlier one, and on those that this worker has been given before.
        """
        ...

    def complete(self, task: Task, ended: Collection[int] = ()) -> list[int]:
        """Take note that a task has run, and return the keys of graphs that have finished with it.

        Each worker's tasks are completed in the order of their submission.

        Args:
          ended: nodes of loops in the task that end with this step, or ended before it.

        Returns:
          Keys of graphs whose nodes have all run, or that the policy held back until now; not those
          of cancelled graphs. Steps of loops that ended may still be submitted.
        """
        ...

    @property
    def has_work(self) -> bool:
        """Whether graphs have been added that have not left."""
        ...

    @property
    def wake_s(self) -> float | None:
        """The time at which `schedule` may return tasks although nothing happens before; or None.

        It matters only while no task is running.
        """
        ...


class CellPolicy(Protocol):
    """A policy: its settings, which make schedulers."""

    @property
    def name(self) -> str: ...

    def new_scheduler(self, types: Sequence[CellType], num_workers: int) -> CellScheduler: ...
