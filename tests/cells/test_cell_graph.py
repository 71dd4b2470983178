"""Graphs are split into subgraphs of one type, as in section 2.4.3 of the thesis."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.cells.batchmaker import BatchMaker
from jaxserve.cells.cell_graph import CellGraph, cell_graph, chain_graph, tree_graph
from jaxserve.cells.flat_graph import flatten
from jaxserve.cells.policy import CellType
from jaxserve.cells.tree_shape import TreeShape
from tests.cells.examples import layout_of, leaf_cell, merge_cell, tree

pytestmark = pytest.mark.fast


def test_a_tree_has_a_subgraph_per_leaf_and_one_for_the_rest():
    """The thesis's example: 16 leaves, and one subgraph of internal nodes."""
    leaf, merge = leaf_cell(), merge_cell()
    graph = flatten(tree(leaf, merge, 16), layout_of(leaf, merge), max_nodes=99).graph
    sizes = sorted(len(subgraph.nodes) for subgraph in graph.subgraphs)
    assert sizes == [1] * 16 + [15]
    (inner,) = (s for s in graph.subgraphs if s.type == 1)
    assert inner.num_dependencies == 16
    assert len(inner.first) == 8


def test_a_chain_is_one_subgraph():
    """Its first node is ready at once."""
    (subgraph,) = chain_graph(0, 5).subgraphs
    assert subgraph.nodes == (0, 1, 2, 3, 4)
    assert subgraph.first == (0,)
    assert subgraph.num_dependencies == 0


def test_a_path_that_leaves_a_subgraph_does_not_come_back():
    """Nodes of one type that are connected, with another type between them, are two subgraphs."""
    graph = cell_graph((0, 1, 0), ((), (0,), (0, 1)), (1, 1, 1))
    assert [subgraph.nodes for subgraph in graph.subgraphs] == [(0,), (1,), (2,)]


def test_structures_are_shared():
    """Graphs of the same structure are the same object."""
    assert chain_graph(0, 7) is chain_graph(0, 7)


@st.composite
def graphs(draw: st.DrawFn) -> CellGraph:
    """Draw types and edges to earlier nodes."""
    num = draw(st.integers(1, 14))
    types = tuple(draw(st.integers(0, 2)) for _ in range(num))
    before = tuple(
        tuple(sorted(draw(st.sets(st.integers(0, node - 1), max_size=3)) if node else ()))
        for node in range(num)
    )
    return CellGraph(types, before, (1,) * num)


@given(graphs())
def test_subgraphs_partition_the_graph(graph: CellGraph):
    """Each node is in one subgraph, of its type; subgraphs depend on earlier ones only."""
    nodes = [node for subgraph in graph.subgraphs for node in subgraph.nodes]
    assert sorted(nodes) == list(range(len(graph)))
    of = graph.subgraph_of
    for number, subgraph in enumerate(graph.subgraphs):
        assert {graph.types[node] for node in subgraph.nodes} == {subgraph.type}
        outer = [
            other
            for node in subgraph.nodes
            for other in graph.predecessors[node]
            if of[other] != number
        ]
        assert len(outer) == subgraph.num_dependencies
        assert all(of[other] < number for other in outer)
        assert _is_connected(graph, subgraph.nodes)


def test_a_tree_has_the_links_of_its_edges():
    """The links that are computed from pairs are those of the partition."""
    pairs = np.array([(0, 1), (3, 2), (6, 5), (4, 7)], np.int32)
    found = tree_graph(0, 1, TreeShape.of(pairs))
    assert found.predecessors[5:] == ((0, 1), (3, 2), (6, 5), (4, 7))
    _check_links(found)


def test_a_chain_has_the_links_of_its_edges():
    """Of one node, too."""
    _check_links(chain_graph(0, 6))
    _check_links(chain_graph(1, 1))


def test_lines_of_a_graph():
    """Nodes that only follow each other form a line, which may end in what others wait for."""
    # 0 - 1 - 2 - 5, with 3 - 4 beside them, and 6 of another type after 4.
    before = ((), (0,), (1,), (), (3,), (2,), (4,))
    links = CellGraph((0, 0, 0, 0, 0, 0, 1), before, (1,) * 7).links
    assert links.ahead.tolist() == [2, 1, 0, 1, 0, 0, 0]
    many = int(links.alone.max())
    assert many > 7
    assert links.alone.tolist() == [3, 2, 1, 2, 1, many, many]


def test_a_graph_is_prepared_for_its_workers():
    """Several workers need the edges of each node, which a tree has not; one needs none."""
    pairs = np.array([(0, 1), (3, 2)], np.int32)
    found, calls = tree_graph(0, 1, TreeShape.of(pairs)), []

    def predecessors():
        calls.append(1)
        return found.predecessors

    graph = CellGraph(found.types, predecessors, found.max_steps, links=found.links)
    graph.prepare(1)
    assert not calls
    graph.prepare(2)
    assert len(calls) == 1
    scheduler = BatchMaker().new_scheduler([CellType("a"), CellType("b")], 2)
    scheduler.add(0, graph, 0, 0.0)
    assert scheduler.schedule(0, 0.0)[0].nodes == [0, 1, 2]
    assert len(calls) == 1


def _check_links(found: CellGraph) -> None:
    wanted = CellGraph(found.types, found.predecessors, found.max_steps)
    for name in ("inner", "outer", "num_inner", "max_steps"):
        np.testing.assert_array_equal(getattr(found.links, name), getattr(wanted.links, name))
    assert found.links.several == wanted.links.several == {}
    for ours, theirs in zip(found.links.entries, wanted.links.entries, strict=True):
        assert (*ours[:2], ours.num_before) == (*theirs[:2], theirs.num_before)
        np.testing.assert_array_equal(ours.nodes, theirs.nodes)


def _is_connected(graph: CellGraph, nodes: tuple[int, ...]) -> bool:
    inside, reached, new = set(nodes), {nodes[0]}, [nodes[0]]
    while new:
        node = new.pop()
        for other in (*graph.predecessors[node], *graph.successors[node]):
            if other in inside and other not in reached:
                reached.add(other)
                new.append(other)
    return reached == inside
