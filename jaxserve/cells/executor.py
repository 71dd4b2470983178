"""The protocol of executors, which run the tasks of cells on devices or in a simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np

from jaxserve.cells.flat_graph import FlatGraph
from jaxserve.cells.layout import CellLayout
from jaxserve.cells.policy import Task, TaskGroup, groups_of
from jaxserve.core.config import bucket

# The largest size of a call whose later tasks may have half of its rows, or any number.
_MOST_PADDED, _ANY_PADDED = 64, 16


@final
@dataclass(frozen=True)
class TaskResults:
    """Results of tasks that were submitted together.

    Attributes:
      ended: for each task, the nodes of loops whose step in the task ended them, or that had ended
        before; empty if the tasks are no loops.
      not_finite: nodes with an output that is NaN, or infinite if their cell does not allow it.
      values: (value, array) of the graphs' outputs that are available now.
      steps: (value, array [steps, ...]) of the emitted outputs of loops, in the order of the steps.
    """

    ended: Sequence[frozenset[int]] = ()
    not_finite: Sequence[int] = ()
    values: Sequence[tuple[int, np.ndarray]] = ()
    steps: Sequence[tuple[int, np.ndarray]] = ()


class CellHandle(Protocol):
    """Tasks of one worker that were submitted together, in order; `tasks` is None without tasks."""

    @property
    def tasks(self) -> TaskGroup | None: ...

    @property
    def has_news(self) -> bool:
        """Whether a request may end or continue with the results."""
        ...

    def is_ready(self) -> bool:
        """Return whether `collect` would return without waiting."""
        ...

    def collect(self) -> TaskResults:
        """Wait for the tasks and return their results. Call it once."""
        ...


class CellExecutor(Protocol):
    """Workers that run tasks, each in the order of their submission, and keep nodes' values.

    Row r of a graph has the id `first_row + r`; its nodes are its first rows.
    """

    @property
    def layout(self) -> CellLayout: ...

    @property
    def num_workers(self) -> int: ...

    @property
    def num_slots(self) -> tuple[int, ...]:
        """Slots of each pool that graphs may reserve on a worker."""
        ...

    def add(self, graph: FlatGraph, first_row: int, kept_row: int = 0) -> None:
        """Add a graph, whose slots have been reserved.

        Args:
          kept_row: first row of the previous graph, whose kept values it takes.
        """
        ...

    def shrink(self, graph: FlatGraph, first_row: int, kept: Sequence[int]) -> None:
        """Drop the values of a graph whose nodes have all run, except some.

        Args:
          kept: values of the graph, which keep their slots until `remove`.
        """
        ...

    def remove(self, graph: FlatGraph, first_row: int) -> None:
        """Drop the values of a graph; tasks that were submitted still find them."""
        ...

    def submit(self, worker: int, tasks: Sequence[Task]) -> list[CellHandle]:
        """Submit tasks of one worker, in their order, and return at once."""
        ...

    def read(self, worker: int, values: Sequence[int]) -> CellHandle:
        """Return a handle without tasks, whose results have values as they are on any worker now.

        Args:
          worker: the handle is ordered between this worker's tasks.
        """
        ...

    def check_integrity(self) -> None:
        """Check that every slot is free or holds one value of an added graph, for tests.

        Raises:
          AssertionError: the slots and graphs are inconsistent.
        """
        ...

    def close(self) -> None:
        """Free all device memory. Nothing can be submitted afterwards."""
        ...


class CompilingExecutor(CellExecutor, Protocol):
    """An executor with executables, which a runtime compiles before requests arrive."""

    def warmup_steps(self) -> list[tuple[str, Callable[[], None]]]:
        """Return (name, function) of every executable; calling a function compiles it."""
        ...


def calls_of(
    tasks: Sequence[Task], layout: CellLayout, max_fused: int
) -> list[tuple[int, TaskGroup]]:
    """Return (compiled size, tasks) of each call of an executable that runs tasks in their order.

    A call runs at most `max_fused` consecutive tasks of one type and size. A smaller task takes the
    size of the previous one if that is at most 16, or at most 64 and twice its own, since another
    call costs more than such padding.
    """
    calls: list[tuple[int, TaskGroup]] = []
    for group in groups_of(tasks):
        batch_sizes = layout.types[group.type].cell.batch_sizes
        begin, of_call = 0, 0
        for number, num_rows in enumerate(group.num_rows):
            size = bucket(num_rows, batch_sizes)
            if number > begin:
                padded = min(_MOST_PADDED, max(_ANY_PADDED, 2 * size))
                fits = size == of_call or size < of_call <= padded
                if fits and number - begin < max_fused:
                    continue
                calls.append((of_call, group[begin:number]))
            begin, of_call = number, size
        calls.append((of_call, group[begin:]))
    return calls
