"""Simulated workers take tasks and return results as devices do."""

from __future__ import annotations

import pytest

from jaxserve.cells import BatchMaker
from jaxserve.cells.layout import Layout
from jaxserve.cells.results import CellCompletion
from jaxserve.cells.simulation import simulate_cells
from jaxserve.core.errors import InvalidCellError, InvalidConfigError
from tests.cells.examples import OneSecond, chain, chain_cell, layout_of, leaf_cell


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


def test_names_and_options_are_checked():
    """Costs are kept by name, and counts are at least 1."""
    with pytest.raises(InvalidCellError, match="named 'same'"):
        Layout([chain_cell("same"), leaf_cell("same")])
    with pytest.raises(InvalidConfigError, match="num_workers"):
        run([1], [0.0], num_workers=0)
