"""Tasks are put together in calls of executables."""

from __future__ import annotations

import pytest

from jaxserve.cells.executor import calls_of
from jaxserve.cells.policy import Task
from tests.cells.examples import chain_cell, layout_of

pytestmark = pytest.mark.fast

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


@pytest.mark.parametrize(
    "rows, calls",
    [
        ([64, 40, 20, 10, 1], [(64, [64, 40, 20]), (16, [10, 1])]),
        ([128, 64], [(128, [128]), (64, [64])]),
        ([16, 1, 8, 16, 17], [(16, [16, 1, 8, 16]), (32, [17])]),
        ([1, 1, 1, 1, 1, 1], [(1, [1] * 5), (1, [1])]),
    ],
)
def test_a_call_has_tasks_of_about_one_size(rows: list[int], calls: list[tuple[int, list[int]]]):
    """Smaller tasks join it if little is computed in vain, and larger ones do not."""
    layout = layout_of(chain_cell(batch_sizes=SIZES))
    tasks = [Task(0, range(num), 0) for num in rows]
    found = calls_of(tasks, layout, 5)
    assert [(size, [len(task.nodes) for task in some]) for size, some in found] == calls
    assert [task for _, some in found for task in some] == tasks
