"""Cells without modules, graphs of them, and a cost of one second a task."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from jaxserve.cells import Graph, Node, SimulatedCell
from jaxserve.cells.cell_graph import CellGraph
from jaxserve.cells.layout import CellLayout
from jaxserve.cells.values import ValueSpec

STATE = ValueSpec((4,), np.dtype(np.float32))
TOKEN = ValueSpec((), np.dtype(np.int32))


class OneSecond:
    """A cost of one second for every task, and nothing for the host."""

    def task_s(self, cell: str, batch: int) -> float:
        return 1.0

    def host_s(self, num_tasks: int) -> float:
        return 0.0


def chain_cell(name: str = "chain", **options) -> SimulatedCell:
    """Return a cell that takes a token and a state and returns a state."""
    return SimulatedCell(name, {"x": TOKEN, "h": STATE}, {"h": STATE}, **options)


def merge_cell(name: str = "merge", **options) -> SimulatedCell:
    """Return a cell that takes two states and returns one."""
    return SimulatedCell(name, {"left": STATE, "right": STATE}, {"h": STATE}, **options)


def leaf_cell(name: str = "leaf", **options) -> SimulatedCell:
    """Return a cell that takes a token and returns a state."""
    return SimulatedCell(name, {"x": TOKEN}, {"h": STATE}, **options)


def loop_cell(name: str = "loop", **options) -> SimulatedCell:
    """Return a loop that takes a state and returns one."""
    return SimulatedCell(name, {"h": STATE}, {"h": STATE}, is_loop=True, **options)


def chain(cell: SimulatedCell, length: int) -> Graph:
    """Return a chain whose last state is the output."""
    node = cell(x=0, h=0.0)
    for token in range(1, length):
        node = cell(x=token, h=node["h"])
    return Graph(outputs={"h": node["h"]})


def tree(leaf: SimulatedCell, merge: SimulatedCell, num_leaves: int) -> Graph:
    """Return a binary tree as balanced as can be."""

    def root(first: int, num: int) -> Node:
        if num == 1:
            return leaf(x=first)
        left, right = root(first, num // 2), root(first + num // 2, num - num // 2)
        return merge(left=left["h"], right=right["h"])

    return Graph(outputs={"h": root(0, num_leaves)["h"]})


def three_cells(sizes: tuple[int, ...] = (1, 2, 4)) -> tuple[SimulatedCell, ...]:
    """Return a leaf, a merge and a loop cell, later ones with higher priority."""
    return (
        leaf_cell(priority=0, batch_sizes=sizes),
        merge_cell(priority=1, batch_sizes=sizes),
        loop_cell(priority=2, batch_sizes=sizes),
    )


@st.composite
def random_graphs(draw: st.DrawFn, cells: tuple[SimulatedCell, ...]) -> Graph:
    """Draw a graph of `three_cells`: every node takes outputs of random earlier nodes."""
    leaf, merge, loop = cells
    nodes = [leaf(x=0)]
    for kind in draw(st.lists(st.sampled_from("lmmrm"), max_size=12)):
        before = [nodes[draw(st.integers(0, len(nodes) - 1))]["h"] for _ in range(2)]
        if kind == "l":
            nodes.append(leaf(x=1))
        elif kind == "m":
            nodes.append(merge(left=before[0], right=before[1]))
        else:
            nodes.append(loop(h=before[0], max_steps=draw(st.integers(1, 6))))
    last = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3, unique=True))
    return Graph(outputs={"last": last[0]["h"], "all": [node["h"] for node in last]})


def layout_of(*cells: SimulatedCell) -> CellLayout:
    """Return the layout of cells."""
    return CellLayout(cells)


def check_links(found: CellGraph) -> None:
    """Check that links that were computed in another way are those of the edges."""
    wanted = CellGraph(found.types, found.predecessors, found.max_steps).links
    for row in (0, 1, 2, 3, 6, 7, 8):  # lines of pairs in trees are not used
        np.testing.assert_array_equal(found.links.rows[row], wanted.rows[row])
    np.testing.assert_array_equal(found.links.heads, wanted.heads)
    assert found.links.several == wanted.several
    for ours, theirs in zip(found.links.entries, wanted.entries, strict=True):
        assert ours._replace(nodes=None) == theirs._replace(nodes=None)
        np.testing.assert_array_equal(ours.nodes, theirs.nodes)
