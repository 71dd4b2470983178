"""Baselines choose the tasks that their systems would."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.cells import BatchMaker
from jaxserve.cells.cell_graph import CellGraph, chain_graph
from jaxserve.cells.layout import CellLayout
from jaxserve.cells.policies import GraphMerging, IdenticalGraphs, LazyBatching, OneAtATime, Padding
from jaxserve.cells.policy import CellScheduler, CellType, Task
from jaxserve.cells.simulation import simulate_cells
from jaxserve.core.errors import InvalidConfigError, InvalidGraphError
from jaxserve.workload.trees import Tree, complete_tree, random_trees
from tests.cells.examples import OneSecond, chain, chain_cell, leaf_cell, merge_cell, tree
from tests.cells.policies.play import play, sizes

pytestmark = pytest.mark.fast

LSTM = [CellType("lstm", batch_sizes=(1, 2, 4))]
TREE = [CellType("leaf", batch_sizes=(64,)), CellType("internal", 1, (64,))]
SEQ2SEQ = [CellType("encoder", batch_sizes=(1, 4)), CellType("decoder", 1, (1, 4), is_loop=True)]
# Figure 2.5 and its text; it does not name the lengths of requests 5 to 8, except that 7 is one.
LENGTHS = (2, 3, 3, 5, 5, 7, 3, 1)
FIGURE_2_5 = [(0.0 if i < 4 else 1.5, chain_graph(0, n)) for i, n in enumerate(LENGTHS)]


def tree_graph(tree: Tree) -> CellGraph:
    """Return the graph of a tree: leaves have type 0, pairs type 1."""
    types, before = [], []

    def visit(part: Tree) -> int:
        inputs = tuple(visit(one) for one in part) if isinstance(part, tuple) else ()
        types.append(int(bool(inputs)))
        before.append(inputs)
        return len(types) - 1

    visit(tree)
    return CellGraph(tuple(types), tuple(before), (1,) * len(types))


def translation(num_words: int, max_steps: int) -> CellGraph:
    """Return an encoder chain and a decoder loop."""
    before = ((), *((node,) for node in range(num_words)))
    return CellGraph((*(0,) * num_words, 1), before, (*(1,) * num_words, max_steps))


def test_graph_batching_of_figure_2_5():
    """The first batch leaves at t=5, with its longest request, and the second at t=12."""
    for policy in (
        Padding(bucket_width=1000, to_longest=True),
        GraphMerging(order="depth", max_graphs=4),
        GraphMerging(max_graphs=4),
    ):
        played = play(policy, LSTM, FIGURE_2_5)
        assert [played.ends[i] for i in range(8)] == [5] * 4 + [12] * 4


@pytest.mark.parametrize(
    "policy", [BatchMaker(max_tasks_to_submit=1), LazyBatching(cell_s={"lstm": 1.0}, target_s=99)]
)
def test_cellular_batching_of_figure_2_5(policy):
    """req1 leaves at t=2, when req5 joins; req2 and req3 at t=3, when req6 and req7 join."""
    played = play(policy, LSTM, FIGURE_2_5)
    assert [played.ends[i] for i in range(8)] == [2, 3, 3, 5, 7, 10, 6, 6]


def test_padding_pads_to_the_end_of_the_bucket():
    """Lengths 21 and 24 of width 10 are both padded to 30, and rows that ended are padding."""
    played = play(Padding(), LSTM, [(0, chain_graph(0, 21)), (0, chain_graph(0, 24))])
    assert sizes(played) == [(0, 2, 0)] * 21 + [(0, 1, 1)] * 3 + [(0, 0, 2)] * 6
    assert played.ends == {0: 30, 1: 30}


def test_buckets_take_turns():
    """After a bucket it is the turn of the next longer one that is not empty."""
    lengths = [1, 2, 3, 1, 2, 3]
    arrivals = [(0.0 if i < 3 else 0.5, chain_graph(0, n)) for i, n in enumerate(lengths)]
    played = play(Padding(bucket_width=1), LSTM, arrivals)
    # The first of length 1 runs alone; then lengths 2 and 3, and length 1 again.
    assert [played.ends[i] for i in range(6)] == [1, 3, 6, 7, 3, 6]


def test_padded_decoders_run_until_the_last_row_has_ended():
    """A decoder's batch keeps its rows; all of its requests leave together."""
    arrivals = [(0.0, translation(2, 9)), (0.0, translation(2, 9))]
    played = play(Padding(bucket_width=2), SEQ2SEQ, arrivals, steps_of={0: 2, 1: 4})
    loop = [size for size in sizes(played) if size[0] == 1]
    # Each step is submitted when the one before it has completed.
    assert loop == [(1, 2, 0)] * 2 + [(1, 1, 1)] * 2 and played.ends == {0: 6, 1: 6}


def test_padding_refuses_trees():
    scheduler = Padding().new_scheduler(TREE, 1)
    with pytest.raises(InvalidGraphError, match="not a chain"):
        scheduler.add(0, tree_graph((1, (2, 3))), 0, 0.0)


def test_merging_by_depth_and_by_agenda():
    """By depth a type runs at each of its depths; by agenda, nodes of all depths that are ready."""
    caterpillar: Tree = (0, (1, (2, 3)))
    complete = tree_graph(complete_tree(16))
    by_depth = play(GraphMerging(order="depth"), TREE, [(0, complete), (0, complete)])
    assert sizes(by_depth) == [(0, 32, 0), (1, 16, 0), (1, 8, 0), (1, 4, 0), (1, 2, 0)]
    types = [CellType("a"), CellType("b")]
    # Two chains a-b-b and a-a-b: by depth b runs at depths 1, 2 and 2; by agenda it waits for a.
    graphs = [
        CellGraph((0, 1, 1), ((), (0,), (1,)), (1, 1, 1)),
        CellGraph((0, 0, 1), ((), (0,), (1,)), (1, 1, 1)),
    ]
    arrivals = [(0.0, graph) for graph in graphs]
    found = sizes(play(GraphMerging(order="depth"), types, arrivals))
    assert found == [(0, 2, 0), (0, 1, 0), (1, 1, 0), (1, 2, 0)]
    assert sizes(play(GraphMerging(), types, arrivals)) == [
        (0, 2, 0),
        (0, 1, 0),
        (1, 2, 0),
        (1, 1, 0),
    ]
    assert len(play(GraphMerging(), TREE, [(0, tree_graph(caterpillar))]).tasks) == 4


def test_identical_graphs_run_node_by_node():
    """A complete tree of 16 leaves is 31 tasks, and each has one node of every such tree."""
    tree = tree_graph(complete_tree(16))
    equal = CellGraph(tree.types, tree.predecessors, tree.max_steps)
    played = play(IdenticalGraphs(), TREE, [(0, tree)] * 2 + [(0, equal), (0, tree_graph((1, 2)))])
    assert [size[1] for size in sizes(played)] == [3] * 31 + [1] * 3


def test_one_at_a_time():
    """Each task has one node, and requests run in their order."""
    played = play(OneAtATime(), LSTM, [(0, chain_graph(0, 3)), (0, chain_graph(0, 2))])
    assert sizes(played) == [(0, 1, 0)] * 5 and played.ends == {0: 3, 1: 5}


def test_lazy_batching_catches_up():
    """A request that arrives preempts a decoder, encodes alone, and joins it then."""
    arrivals = [(0.0, translation(2, 6)), (3.5, translation(2, 3))]
    policy = LazyBatching(cell_s={"encoder": 1.0, "decoder": 1.0}, target_s=99)
    found = sizes(play(policy, SEQ2SEQ, arrivals))
    assert found[:8] == [(0, 1, 0)] * 2 + [(1, 1, 0)] * 2 + [(0, 1, 0)] * 2 + [(1, 2, 0)] * 2


def test_lazy_batching_keeps_the_target():
    """A request waits if another one would miss its target, and runs when the stack is empty."""
    arrivals = [(0.0, chain_graph(0, 6)), (1.0, chain_graph(0, 6))]
    for target_s, ends in ((7.5, [6, 12]), (20.0, [6, 7])):
        played = play(LazyBatching(cell_s={"lstm": 1.0}, target_s=target_s), LSTM, arrivals)
        assert [played.ends[0], played.ends[1]] == ends


def test_lazy_batching_admits_together_what_keeps_the_target():
    """Of three chains of 4 s that arrive at once, two are within 9 s; the third waits for them."""
    arrivals = [(0.0, chain_graph(0, 4))] * 3
    played = play(LazyBatching(cell_s={"lstm": 1.0}, target_s=9.0), LSTM, arrivals)
    assert sizes(played)[:4] == [(0, 2, 0)] * 3 + [(0, 3, 0)]


POLICIES = [
    GraphMerging(order="depth", max_graphs=3),
    GraphMerging(max_graphs=5),
    IdenticalGraphs(),
    OneAtATime(),
    LazyBatching(cell_s={"leaf": 1.0, "internal": 1.5, "encoder": 1.0, "decoder": 2.0}),
    LazyBatching(
        cell_s={"leaf": 1.0, "internal": 1.5, "encoder": 1.0, "decoder": 2.0}, target_s=50
    ),
]


@given(seed=st.integers(0, 10_000), policy=st.sampled_from(POLICIES))
def test_trees_end_once_and_in_order(seed, policy):
    """Random trees and cancellations: each node runs once, after those it needs (see `play`)."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 12, 10).tolist()
    times = np.cumsum(random.exponential(3, 10)).tolist()
    graphs = [tree_graph(tree) for tree in random_trees(lengths, seed)]
    cancelled = {int(n): times[n] + float(random.exponential(5)) for n in random.integers(0, 10, 2)}
    types = [CellType("leaf", batch_sizes=(2, 4)), CellType("internal", 1, (1, 3))]
    play(policy, types, list(zip(times, graphs, strict=True)), cancelled=cancelled)


@given(seed=st.integers(0, 10_000), policy=st.sampled_from([Padding(bucket_width=3), *POLICIES]))
def test_loops_end_once(seed, policy):
    """Random encoders and loops that end early, with cancellations."""
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(3, 10)).tolist()
    graphs = [translation(int(n), int(n) + 4) for n in random.integers(1, 9, 10)]
    steps = {i: int(random.integers(1, graphs[i].max_steps[-1] + 1)) for i in range(0, 10, 2)}
    cancelled = {int(n): times[n] + float(random.exponential(5)) for n in random.integers(0, 10, 2)}
    arrivals = list(zip(times, graphs, strict=True))
    play(policy, SEQ2SEQ, arrivals, steps_of=steps, cancelled=cancelled)


def test_settings_are_checked():
    """Limits below 1, unknown orders and missing times are refused."""
    for make in (
        lambda: Padding(bucket_width=0),
        lambda: Padding(max_graphs=0),
        lambda: GraphMerging(max_graphs=0),
        lambda: GraphMerging(order="breadth"),
        lambda: IdenticalGraphs(max_graphs=0),
        lambda: LazyBatching(cell_s={}, target_s=0),
        lambda: LazyBatching(cell_s={"encoder": 1.0}).new_scheduler(SEQ2SEQ, 1),
    ):
        with pytest.raises(InvalidConfigError):
            make()


def test_a_graph_that_a_policy_refuses_fails_alone():
    """Its request ends with a typed error, and the others finish."""
    leaf, merge, lstm = leaf_cell(), merge_cell(), chain_cell()
    graphs = [tree(leaf, merge, 4), chain(lstm, 3), chain(lstm, 5)]
    refused, *others = simulate_cells(
        CellLayout([leaf, merge, lstm]), [(0.0, graph) for graph in graphs], Padding(), OneSecond()
    ).completions
    assert type(refused.error) is InvalidGraphError and "chain" in str(refused.error)
    assert [one.finish_reason for one in others] == ["stop", "stop"]


@final
class Broken:
    """A policy, and its scheduler, that raises for every graph."""

    name = "broken"
    has_work = False
    wake_s = None

    def new_scheduler(self, types: Sequence[CellType], num_workers: int) -> CellScheduler:
        return self

    def add(self, key: int, graph: CellGraph, first_node: int, now_s: float) -> None:
        raise ZeroDivisionError("not a number")

    def cancel(self, key: int) -> None:
        """Do nothing: it has no graph."""

    def schedule(self, worker: int, now_s: float) -> list[Task]:
        return []

    def complete(self, tasks: Sequence[Task], ended: Sequence[Collection[int]] = ()) -> list[int]:
        return []


def test_an_error_of_a_policy_ends_the_request_alone():
    """The error names the policy and its cause, and the loop goes on."""
    lstm = chain_cell()
    arrivals = [(0.0, chain(lstm, 3)), (1.0, chain(lstm, 5))]
    for one in simulate_cells(CellLayout([lstm]), arrivals, Broken(), OneSecond()).completions:
        assert type(one.error) is InvalidGraphError
        assert "'broken' raised ZeroDivisionError" in str(one.error)
        assert isinstance(one.error.__cause__, ZeroDivisionError)
