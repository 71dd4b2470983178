"""Algorithm 1 of the thesis, by its decisions, and its invariants under random loads."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.cells import Graph, SimulatedCell
from jaxserve.cells.answers import CellAnswer
from jaxserve.cells.batchmaker import BatchMaker
from jaxserve.cells.cell_graph import CellGraph
from jaxserve.cells.engine import CellEngine
from jaxserve.cells.flat_graph import flatten
from jaxserve.cells.policy import Task, groups_of
from jaxserve.cells.simulation import SimulatedCells
from jaxserve.core.clock import VirtualClock
from tests.cells.examples import OneSecond, chain_cell, layout_of, random_graphs, three_cells
from tests.cells.reference import Reference
from tests.common.tiers import examples, some

pytestmark = pytest.mark.fast


def nodes_of(tasks: Sequence[Task]) -> list[list[int]]:
    """Return the nodes of tasks."""
    return [list(task.nodes) for task in tasks]


def test_loops_of_loops_are_subgraphs_of_their_own():
    """A loop that takes the last value of another one waits for its end."""
    graph = CellGraph((0, 0), ((), (0,)), (3, 3), frozenset({0}))
    assert graph.links.heads.tolist() == [0, 1]


CELLS = three_cells()


def random_tree(cells: tuple[SimulatedCell, ...], random: Random) -> Graph:
    """Return a tree of 1 to 9 leaves that one call makes."""
    leaf, merge, _ = cells
    num = random.randint(1, 9)
    loose, pairs = list(range(num)), []
    while len(loose) > 1:
        pairs.append([loose.pop(random.randrange(len(loose))) for _ in range(2)])
        loose.append(num + len(pairs) - 1)
    sides = {"left": {"left": "h"}, "right": {"right": "h"}}
    return Graph({"h": merge.tree(leaf, {"x": [0] * num}, pairs, **sides)["h"]})


def forked_chains(cells: tuple[SimulatedCell, ...], lengths: list[int]) -> Graph:
    """Return chains side by side, some of which begin or end at nodes of other types.

    Chains of odd lengths wait for a leaf, and only those of a multiple of 3 are merged.
    """
    leaf, merge, link = cells
    ends, merged = [], None
    for length in lengths:
        state = leaf(x=0)["h"] if length % 2 else 0.0
        node = link(x=1, h=state)
        for token in range(1, length):
            node = link(x=token, h=node["h"])
        ends.append(node)
        if length % 3 == 0:
            last = ends[-1] if merged is None else merged
            merged = merge(left=last["h"], right=node["h"])
    outputs = [node["h"] for node in ends]
    return Graph(outputs={"ends": outputs if merged is None else [*outputs, merged["h"]]})


# 250 times at least 8 graphs, in each of the tests.
@examples(10, 250)
@given(st.data())
def test_every_request_ends_once_under_random_loads(data: st.DataObject):
    """Nodes run once, after their dependencies, in tasks of one type and size; then all is free.

    `SimulatedCells` checks each task.
    """
    num_workers = data.draw(st.integers(1, 3))
    clock, layout = VirtualClock(), layout_of(*CELLS)
    lengths = data.draw(st.randoms(use_true_random=False))
    executor = SimulatedCells(
        layout,
        clock,
        OneSecond(),
        num_workers=num_workers,
        loop_length=lambda graph, node: 1 + (graph.num_nodes + node) % graph.graph.max_steps[node],
    )
    policy = BatchMaker(
        max_tasks_to_submit=data.draw(st.integers(1, 4)),
        releases_at_submission=data.draw(st.booleans()),
    )
    max_admitted = data.draw(st.sampled_from([None, 1, 3]))
    engine = CellEngine(executor, policy, clock, max_nodes=99, max_admitted=max_admitted)
    graphs = data.draw(st.lists(random_graphs(CELLS), min_size=8, max_size=10))
    waiting = [
        CellAnswer(f"{number}", flatten(graph, layout, max_nodes=99), 0.0)
        for number, graph in enumerate(graphs)
    ]
    answers = list(waiting)
    ended: Counter[str] = Counter()
    while waiting or engine.has_work:
        action = lengths.random()
        if waiting and action < 0.4:
            engine.begin(waiting.pop())
        elif action < 0.5:
            engine.cancel(f"{lengths.randrange(len(graphs))}")
        # Also without work: a cancellation may have ended the last request.
        ended.update(completion.request_id for completion in engine.step())
        engine.check_integrity()
    assert ended == Counter(answer.id for answer in answers)
    for answer in answers:
        completion = answer.future.result()
        if completion.finish_reason != "cancelled":
            assert completion.error is None
            assert completion["last"].shape == (4,)
            assert len(completion["all"]) >= 1


@pytest.mark.parametrize(("max_admitted", "sizes"), [(None, [5]), (2, [2, 3])])
def test_a_device_gets_tasks_before_all_graphs_have_started(max_admitted, sizes):
    """While it runs them the others start; without a limit, all start before the first task."""
    clock, chain = VirtualClock(), chain_cell(batch_sizes=(1, 8))
    layout = layout_of(chain)
    executor = SimulatedCells(layout, clock, OneSecond(), num_workers=1)
    engine = CellEngine(executor, BatchMaker(), clock, max_nodes=9, max_admitted=max_admitted)
    for number in range(5):
        graph = Graph({"h": chain(x=number, h=0.0)["h"]})
        engine.begin(CellAnswer(f"{number}", flatten(graph, layout, max_nodes=9), 0.0))
    ended = []
    while engine.has_work:
        ended += [completion.request_id for completion in engine.step()]
    assert ended == ["0", "1", "2", "3", "4"]
    assert [step.num_rows for step in engine.recorder.records.steps] == sizes


@pytest.mark.parametrize(
    ("has_loops", "num_workers"),
    some([(True, 2), (False, 1), (True, 1), (True, 3), (False, 2), (False, 3)], 0, 1),
)
@examples(10, 250)
@given(st.data())
def test_it_decides_as_algorithm_1_does(has_loops: bool, num_workers: int, data: st.DataObject):
    """Its tasks are those of the algorithm node by node, also under cancellations.

    On one worker without loops it knows at submission which graphs end with a task.
    """
    cells = CELLS if has_loops else (*CELLS[:2], chain_cell(batch_sizes=(2, 4)))
    layout = layout_of(*cells)
    types = layout.cell_types
    max_tasks, early = data.draw(st.integers(1, 5)), data.draw(st.booleans())
    policy = BatchMaker(max_tasks_to_submit=max_tasks, releases_at_submission=early)
    both = [
        policy.new_scheduler(types, num_workers),
        Reference(types, num_workers, max_tasks, early=early),
    ]
    random = Random(data.draw(st.integers(0, 2**16)))
    if has_loops:
        graphs = data.draw(st.lists(random_graphs(CELLS), min_size=8, max_size=10))
    else:
        graphs = [
            random_tree(cells, random)
            if random.random() < 0.5
            else forked_chains(cells, [random.randint(1, 9) for _ in range(random.randint(1, 4))])
            for _ in range(data.draw(st.integers(8, 12)))
        ]
    waiting = [flatten(graph, layout, max_nodes=99).graph for graph in graphs]
    in_flight: list[deque[tuple[Task, Task]]] = [deque() for _ in range(num_workers)]
    running: set[int] = set()
    first, key = 0, 0
    while waiting or any(in_flight) or both[0].has_work:
        action, worker = random.random(), random.randrange(num_workers)
        if waiting and action < 0.5:
            graph = waiting.pop()
            for chooser in both:
                chooser.add(key, graph, first, 0.0)
            running.add(key)
            first, key = first + len(graph), key + 1
        elif running and action < 0.6:
            gone = random.choice(sorted(running))
            running.remove(gone)
            for chooser in both:
                chooser.cancel(gone)
        mine = in_flight[worker]
        if action < 0.9 and len(mine) < 9:
            ours, wanted = [chooser.schedule(worker, 0.0) for chooser in both]
            assert [(t.type, t.nodes) for t in ours] == [(t.type, t.nodes) for t in wanted]
            assert all(
                group.array.tolist() == sum(nodes_of(group), []) for group in groups_of(ours)
            )
            assert all(task.worker == worker for task in ours)
            mine.extend(zip(ours, wanted, strict=True))
        if mine and (action > 0.3 or len(mine) >= 9):
            ours, wanted = mine.popleft()
            ended = {n for n in ours.nodes if types[ours.type].is_loop and random.random() < 0.3}
            finished = both[0].complete([ours], [ended])
            assert finished == both[1].complete([wanted], [ended])
            running.difference_update(finished)
    assert not running and not both[1].has_work
