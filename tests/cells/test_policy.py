"""Groups of tasks are sequences of tasks, as arrays."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.cells.batchmaker import BatchMaker
from jaxserve.cells.cell_graph import chain_graph
from jaxserve.cells.policy import CellType, Task, TaskGroup, groups_of, with_ended

pytestmark = pytest.mark.fast


def test_a_group_makes_its_tasks():
    """They have its type and worker, and the nodes and padding of their places."""
    group = TaskGroup(2, 1, np.array([5, 6, 9, 7]), [2, 1, 1], num_rows=[2, 1, 3])
    assert [(task.nodes, task.num_padding) for task in group] == [([5, 6], 0), ([9], 0), ([7], 2)]
    assert {(task.type, task.worker) for task in group} == {(2, 1)}
    assert [nodes.tolist() for nodes in group.arrays()] == [[5, 6], [9], [7]]
    assert group[0] is group[0] and len(group) == 3


def test_a_slice_of_a_group_is_a_group():
    """It has the nodes of its tasks; one with gaps is none."""
    group = TaskGroup(0, 0, np.array([5, 6, 9, 7]), [2, 1, 1], num_rows=[2, 1, 3])
    part = group[1:]
    assert part.array.tolist() == [9, 7] and list(part.num_rows) == [1, 3]
    assert [task.nodes for task in part] == [[9], [7]]
    with pytest.raises(IndexError, match="step 2"):
        group[::2]


def test_consecutive_tasks_of_a_type_are_a_group():
    """It keeps the tasks that it is made of, also in its slices."""
    tasks = [Task(0, [1, 2], 0), Task(0, [3], 0, 1), Task(1, [4], 0), Task(0, [5], 0)]
    groups = groups_of(tasks)
    assert [list(group) for group in groups] == [tasks[:2], [tasks[2]], [tasks[3]]]
    assert list(groups[0].num_rows) == [2, 2] and groups[0].array.tolist() == [1, 2, 3]
    assert groups[0][1:][0] is tasks[1]
    assert groups_of(groups[0]) == [groups[0]]


def test_nodes_that_have_ended_are_of_their_task():
    """Tasks that are no loops have none."""
    tasks = [Task(0, [1, 2], 0), Task(0, [1, 2], 0)]
    assert list(with_ended(tasks, [{1}, {2}])) == [(tasks[0], {1}), (tasks[1], {2})]
    assert [ended for _, ended in with_ended(tasks, [])] == [(), ()]
    with pytest.raises(ValueError, match="shorter"):
        list(with_ended(tasks, [{1}]))


def test_tasks_are_completed_in_their_order():
    """A part of those that were submitted together may be completed alone, but no other ones."""
    policy = BatchMaker(max_tasks_to_submit=4)
    chooser = policy.new_scheduler([CellType("a", batch_sizes=(1, 2, 4))], 1)
    chooser.add(7, chain_graph(0, 2), 0, 0.0)
    chooser.add(8, chain_graph(0, 3), 10, 0.0)
    chooser.add(9, chain_graph(0, 9), 20, 0.0)
    tasks, after = chooser.schedule(0, 0.0), chooser.schedule(0, 0.0)
    assert [list(task.nodes) for task in tasks] == [[0, 10, 20], [1, 11, 21], [12, 22], [23]]
    assert chooser.complete(tasks[:1]) == []
    assert chooser.complete(tasks[1:3]) == [7, 8]
    with pytest.raises(AssertionError, match="order"):
        chooser.complete(after[:1])


def test_tasks_that_are_completed_together_end_their_graphs():
    """The graphs finish in the order of the tasks with their last nodes."""
    policy = BatchMaker(max_tasks_to_submit=9)
    chooser = policy.new_scheduler([CellType("a", batch_sizes=(1, 2, 4))], 1)
    for key, length in enumerate((3, 1, 2)):
        chooser.add(key, chain_graph(0, length), 10 * key, 0.0)
    assert chooser.complete(chooser.schedule(0, 0.0)) == [1, 2, 0]
    assert not chooser.has_work
