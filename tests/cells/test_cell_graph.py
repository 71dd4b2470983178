"""Graphs are split into subgraphs of one type, as in section 2.4.3 of the thesis."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.cells.cell_graph import CellGraph, chain_graph, tree_graph
from jaxserve.cells.flat_graph import flatten
from jaxserve.cells.tree_shape import TreeShape
from tests.cells.examples import check_links, layout_of, leaf_cell, merge_cell, tree

pytestmark = pytest.mark.fast


def test_a_tree_has_a_subgraph_per_leaf_and_one_for_the_rest():
    """The thesis's example: 16 leaves, and one subgraph of internal nodes."""
    leaf, merge = leaf_cell(), merge_cell()
    links = flatten(tree(leaf, merge, 16), layout_of(leaf, merge), max_nodes=99).graph.links
    assert sorted(Counter(links.heads.tolist()).values()) == [1] * 16 + [15]
    leaves, inner = links.entries
    assert leaves.is_several and (leaves.type, len(leaves.nodes), leaves.num_before) == (0, 16, 0)
    assert (inner.type, len(inner.nodes), inner.num_before) == (1, 8, 16)


def test_a_chain_is_one_subgraph():
    """Its first node is ready at once."""
    links = chain_graph(0, 5).links
    assert links.heads.tolist() == [0] * 5
    (entry,) = links.entries
    assert entry.nodes.tolist() == [0] and entry.num_before == 0 and not entry.is_several


def test_a_path_that_leaves_a_subgraph_does_not_come_back():
    """Nodes of one type that are connected, with another type between them, are two subgraphs."""
    graph = CellGraph((0, 1, 0), ((), (0,), (0, 1)), (1, 1, 1))
    assert graph.links.heads.tolist() == [0, 1, 2]


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
    """They are connected and of one type, and the edges between them form no cycle."""
    links = graph.links
    heads = links.heads.tolist()
    entries = {node: entry for entry in links.entries for node in entry.nodes.tolist()}
    edges = [(a, b) for b, before in enumerate(graph.predecessors) for a in before]
    outer = {(heads[a], heads[b]) for a, b in edges if heads[a] != heads[b]}
    for head in set(heads):
        nodes = [node for node, other in enumerate(heads) if other == head]
        assert nodes[0] == head and {graph.types[node] for node in nodes} == {graph.types[head]}
        assert _is_connected(graph, nodes)
        num_before = sum(heads[b] == head != heads[a] for a, b in edges)
        first = [n for n in nodes if all(heads[a] != head for a in graph.predecessors[n])]
        entry = entries[first[0]]
        assert (entry.type, entry.num_before) == (graph.types[head], num_before)
        assert entry.is_several or entry.nodes.tolist() == first
    while last := set(heads).difference(a for a, _ in outer):
        heads = [head for head in heads if head not in last]
        outer = {(a, b) for a, b in outer if b not in last}
    assert not heads


def test_a_tree_has_the_links_of_its_edges():
    """The links that are computed from pairs are those of the partition."""
    pairs = np.array([(0, 1), (3, 2), (6, 5), (4, 7)], np.int32)
    found = tree_graph(0, 1, TreeShape(pairs))
    assert found.predecessors[5:] == ((0, 1), (3, 2), (6, 5), (4, 7))
    check_links(found)


def test_a_chain_has_the_links_of_its_edges():
    """Of one node, too."""
    check_links(chain_graph(0, 6))
    check_links(chain_graph(1, 1))


def test_lines_of_a_graph():
    """Nodes that only follow each other form a line, which may end in what others wait for."""
    # 0 - 1 - 2 - 5, with 3 - 4 beside them, and 6 of another type after 4.
    before = ((), (0,), (1,), (), (3,), (2,), (4,))
    links = CellGraph((0, 0, 0, 0, 0, 0, 1), before, (1,) * 7).links
    ahead, alone = links.rows[4:6].tolist()
    assert ahead == [2, 1, 0, 1, 0, 0, 0]
    many = max(alone)
    assert many > 7
    assert alone == [3, 2, 1, 2, 1, many, many]


def _is_connected(graph: CellGraph, nodes: list[int]) -> bool:
    inside, reached, new = set(nodes), {nodes[0]}, [nodes[0]]
    while new:
        node = new.pop()
        for other in (*graph.predecessors[node], *graph.successors[node]):
            if other in inside and other not in reached:
                reached.add(other)
                new.append(other)
    return reached == inside
