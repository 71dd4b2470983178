"""Simulated workers take tasks and return results as devices do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import final

import pytest

from jaxserve.cells import BatchMaker
from jaxserve.cells.answers import CellCompletion
from jaxserve.cells.cell_graph import CellGraph
from jaxserve.cells.layout import CellLayout
from jaxserve.cells.policy import CellScheduler, CellType
from jaxserve.cells.simulation import simulate_cells
from jaxserve.core.errors import InvalidCellError, InvalidConfigError, InvalidGraphError
from tests.cells.examples import OneSecond, chain, chain_cell, layout_of, leaf_cell

pytestmark = pytest.mark.fast


def run(
    lengths: list[int],
    arrivals: list[float],
    *,
    sizes: tuple[int, ...] = (1, 4),
    tasks: int = 1,
    **options,
) -> tuple[CellCompletion, ...]:
    """Return the completions of chains; a task takes a second."""
    cell = chain_cell(batch_sizes=sizes)
    requests = [(at_s, chain(cell, num)) for at_s, num in zip(arrivals, lengths, strict=True)]
    policy = BatchMaker(max_tasks_to_submit=tasks)
    options["max_tasks_to_submit"] = tasks
    return simulate_cells(layout_of(cell), requests, policy, OneSecond(), **options).completions


@pytest.mark.parametrize("tasks, ends", [(1, [1.0, 2.0, 2.0]), (5, [2.0] * 3)])
def test_results_of_a_call_are_learned_together(tasks: int, ends: list[float]):
    """A call runs up to `max_tasks_to_submit` tasks, and a request waits for the last of them."""
    done = run([1, 2, 2], [0.0] * 3, tasks=tasks)
    assert [one.timing.finished_s for one in done] == ends


def test_a_request_begins_after_the_tasks_before_it():
    """Its first task is submitted at 1 s, while another one runs until 2 s."""
    _, done = run([2, 1], [0.0, 0.5], sizes=(1,))
    assert (done.timing.admitted_s, done.timing.finished_s) == (2.0, 3.0)


def test_an_arrival_does_not_wait_for_another_worker():
    """The second worker is idle when it arrives."""
    _, done = run([5, 1], [0.0, 0.5], num_workers=2)
    assert (done.timing.admitted_s, done.timing.finished_s) == (0.5, 1.5)


def test_workers_are_loaded_evenly():
    """A worker without tasks goes before one that has some."""
    cell = chain_cell(batch_sizes=(1,))
    requests = [(2.0 * number, chain(cell, 1)) for number in range(8)]
    requests += [(20.0, chain(cell, 3)) for _ in range(16)]
    policy = BatchMaker(max_tasks_to_submit=1)
    done = simulate_cells(
        layout_of(cell), requests, policy, OneSecond(), num_workers=8, max_tasks_to_submit=1
    )
    tasks = Counter(step.group for step in done.records.steps)
    assert sorted(tasks) == list(range(8)) and max(tasks.values()) <= min(tasks.values()) + 2
    assert done.wall_s <= 27.0


@final
class Picky:
    """A policy that schedules no chain of three nodes."""

    name = "picky"

    def new_scheduler(self, types: Sequence[CellType], num_workers: int) -> CellScheduler:
        return PickyScheduler(BatchMaker().new_scheduler(types, num_workers))


@final
class PickyScheduler:
    """See `Picky`."""

    wake_s = None

    def __init__(self, inner: CellScheduler):
        self._inner = inner
        self._left: set[int] = set()
        self.schedule, self.complete = inner.schedule, inner.complete

    @property
    def has_work(self) -> bool:
        return bool(self._left) or self._inner.has_work

    def add(self, key: int, graph: CellGraph, first_node: int, now_s: float) -> None:
        if len(graph) == 3:
            self._left.add(key)
        else:
            self._inner.add(key, graph, first_node, now_s)

    def cancel(self, key: int) -> None:
        if key in self._left:
            self._left.remove(key)
        else:
            self._inner.cancel(key)


def test_what_a_policy_never_schedules_ends_alone():
    """With a typed error, when nothing else runs; what comes later is served."""
    cell = chain_cell()
    lengths = [1, 3, 2, 3, 5]
    requests = [(float(number), chain(cell, num)) for number, num in enumerate(lengths)]
    done = simulate_cells(layout_of(cell), requests, Picky(), OneSecond())
    for length, completion in zip(lengths, done.completions, strict=True):
        if length == 3:
            assert isinstance(completion.error, InvalidGraphError)
            assert "'picky' schedules none" in str(completion.error)
        else:
            assert completion.error is None


def test_names_and_options_are_checked():
    """Costs are kept by name, and counts are at least 1."""
    with pytest.raises(InvalidCellError, match="named 'same'"):
        CellLayout([chain_cell("same"), leaf_cell("same")])
    with pytest.raises(InvalidConfigError, match="num_workers"):
        run([1], [0.0], num_workers=0)
