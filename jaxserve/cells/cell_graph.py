"""Graphs of cells as schedulers see them: integers, and their partition into subgraphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias, final

import numpy as np

from jaxserve.cells.tree_shape import TreeShape

_Edges: TypeAlias = "tuple[tuple[int, ...], ...]"

# Values without a single successor. After adding a graph's first node id they stay distinct and
# negative.
NO_SUCCESSOR = -(1 << 40)
SEVERAL = 2 * NO_SUCCESSOR
# More tasks than a graph has nodes.
_ANY_NUMBER = 1 << 40
# `Links.rows` of a node within a chain and within a tree, except its number and those after it.
_IN_CHAIN = np.array([[0], [NO_SUCCESSOR], [0], [1], [0], [_ANY_NUMBER], [1], [0], [0]])
_IN_TREE = np.array([[0], [NO_SUCCESSOR], [0], [0], [0], [1], [1], [0], [0]])


class SubgraphEntry(NamedTuple):
    """The nodes of a subgraph that are ready when the nodes before the subgraph have run.

    A subgraph is a set of connected nodes of one type (thesis, 2.4.3); a loop's node is one by
    itself. All nodes of a type that depend on nothing and are subgraphs by themselves, such as the
    leaves of a tree, have one entry, which `is_several`.

    Attributes:
      head: the first node of the subgraph, which identifies it.
      nodes: int64 [n], those without a predecessor in the subgraph.
      num_before: edges from nodes of other subgraphs.
    """

    head: int
    type: int
    nodes: np.ndarray
    num_before: int
    is_several: bool = False


class Links(NamedTuple):
    """The edges of a graph as arrays int64 [nodes], for a scheduler that handles a task at once.

    Attributes:
      rows: [9, nodes], with which a scheduler's state of each node begins:
        0: its successor in its own subgraph; `NO_SUCCESSOR`, or `SEVERAL`.
        1: likewise, the head of the subgraph of its successor in another one.
        2: zero, to which a scheduler adds the graph's first node.
        3: the number of its predecessors in its own subgraph.
        4: how many nodes follow it in a line: those with the next numbers, each the only successor
          of the previous one, which is its only predecessor in the subgraph.
        5: for how many tasks, from the node's own on, its line makes no other node ready; a large
          number if nothing follows the line, else the nodes that are left of it.
        6: the most times that it runs; 7 and 8: zeros.
      heads: the head of each node's subgraph; of an entry that `is_several`, the node itself.
      several: node -> its successors (inner, outer), if it has several of either.
      entries: in the order in which subgraphs without a node before them are released.
    """

    rows: np.ndarray
    heads: np.ndarray
    several: Mapping[int, tuple[Sequence[int], Sequence[int]]]
    entries: tuple[SubgraphEntry, ...]


@final
@dataclass(eq=False, repr=False)
class CellGraph:
    """The structure of a request's graph. Nodes are numbered from 0, dependencies first.

    Instances never change, and graphs share them with their plans.

    Attributes:
      types: index of the cell type of each node.
      edges: `predecessors`, or a function that returns them, since schedulers may not need them.
      max_steps: most times that each node runs; 1 except for loops.
      loop_types: the types that are loops.
      known_links: its `links`, if they are known.
    """

    types: tuple[int, ...]
    edges: _Edges | Callable[[], _Edges]
    max_steps: tuple[int, ...]
    loop_types: frozenset[int] = frozenset()
    known_links: Links | None = None

    def __len__(self) -> int:
        return len(self.types)

    @cached_property
    def predecessors(self) -> _Edges:
        """For each node the nodes whose outputs it takes, each once."""
        return self.edges() if callable(self.edges) else self.edges

    @cached_property
    def successors(self) -> _Edges:
        found: list[list[int]] = [[] for _ in self.types]
        for node, before in enumerate(self.predecessors):
            for other in before:
                found[other].append(node)
        return tuple(map(tuple, found))

    @cached_property
    def followers(self) -> list[int]:
        """For each node its last successor; -1 for none."""
        found = [-1] * len(self)
        for node, before in enumerate(self.predecessors):
            for other in before:
                found[other] = node
        return found

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """For each node, the number of edges on the longest path to it."""
        depths: list[int] = []
        for before in self.predecessors:
            depths.append(1 + max((depths[other] for other in before), default=-1))
        return tuple(depths)

    @cached_property
    def links(self) -> Links:
        """The edges, and the partition into subgraphs; any thread may compute them."""
        return self.known_links or _links_of(self)


def chain_graph(type: int, num_nodes: int) -> CellGraph:
    rows = np.empty((len(_IN_CHAIN), num_nodes), np.int64)
    rows[:] = _IN_CHAIN
    rows[0] = np.arange(1, num_nodes + 1)
    rows[0, -1] = NO_SUCCESSOR
    rows[3, 0] = 0
    rows[4] = np.arange(num_nodes)[::-1]
    heads = np.zeros(num_nodes, np.int64)
    entries = (SubgraphEntry(0, type, np.zeros(1, np.int64), 0),)
    return CellGraph(
        (type,) * num_nodes,
        lambda: ((), *((node,) for node in range(num_nodes - 1))),
        (1,) * num_nodes,
        known_links=Links(rows, heads, {}, entries),
    )


def tree_graph(leaf_type: int, pair_type: int, shape: TreeShape) -> CellGraph:
    pairs = shape.pairs
    num = len(pairs) + 1  # leaves
    types, max_steps, heads = _nodes_of_trees(leaf_type, pair_type, num)
    # Each pair is a separate line: lines of pairs in deep trees are not used.
    rows = np.empty((len(_IN_TREE), num + len(pairs)), np.int64)
    rows[:] = _IN_TREE
    inner, outer, _, num_inner = rows[:4]
    inner[pairs] = np.arange(num, num + len(pairs))[:, None]
    inner[:num] = inner[-1] = NO_SUCCESSOR
    outer[:num] = num
    is_pair = pairs >= num
    num_inner[num:] = is_pair[:, 0]
    num_inner[num:] += is_pair[:, 1]
    entries = (
        SubgraphEntry(0, leaf_type, heads[:num], 0, is_several=True),
        SubgraphEntry(num, pair_type, num + np.flatnonzero(num_inner[num:] == 0), num),
    )
    return CellGraph(
        types,
        lambda: (*[()] * num, *map(tuple, pairs.tolist())),
        max_steps,
        known_links=Links(rows, heads, {}, entries),
    )


@lru_cache(maxsize=1024)
def _nodes_of_trees(
    leaf_type: int, pair_type: int, num_leaves: int
) -> tuple[tuple[int, ...], tuple[int, ...], np.ndarray]:
    types = (leaf_type,) * num_leaves + (pair_type,) * (num_leaves - 1)
    return types, (1,) * len(types), np.minimum(np.arange(len(types)), num_leaves)


def _links_of(graph: CellGraph) -> Links:
    types, heads, phases = graph.types, *_heads(graph)
    num_nodes, num_inner, num_outer = ([0] * len(types) for _ in range(3))
    inner, outer, first = ([[] for _ in types] for _ in range(3))  # lists of nodes
    for node, before in enumerate(graph.predecessors):
        head = heads[node]
        num_nodes[head] += 1
        for other in before:
            if heads[other] == head:
                inner[other].append(node)
                num_inner[node] += 1
            else:
                outer[other].append(head)
                num_outer[head] += 1
        if not num_inner[node]:
            first[head].append(node)
    starts: dict[int, list[int]] = {}
    later: list[int] = []
    for head, num in enumerate(num_nodes):
        if num == 1 and not graph.predecessors[head] and types[head] not in graph.loop_types:
            starts.setdefault(types[head], []).append(head)
        elif num:
            later.append(head)
    later.sort(key=phases.__getitem__)
    entries = [
        SubgraphEntry(some[0], type, np.array(some), 0, is_several=len(some) > 1)
        for type, some in starts.items()
    ]
    entries += [SubgraphEntry(h, types[h], np.array(first[h]), num_outer[h]) for h in later]
    rows = np.zeros((len(_IN_CHAIN), len(types)), np.int64)
    rows[0], rows[1], rows[3], rows[6] = _only(inner), _only(outer), num_inner, graph.max_steps
    rows[4:6] = _lines(rows[0], rows[1], rows[3])
    return Links(
        rows=rows,
        heads=np.array(heads, np.int64),
        several={
            node: both
            for node, both in enumerate(zip(inner, outer, strict=True))
            if len(both[0]) > 1 or len(both[1]) > 1
        },
        entries=tuple(entries),
    )


def _heads(graph: CellGraph) -> tuple[list[int], list[int]]:
    """Return for each node the first node of its subgraph, and its phase.

    Connected nodes of one type and phase are a subgraph. A node's phase is the maximum over its
    predecessors of their phase (same type) or their phase plus one (other types). So a path that
    leaves a subgraph never returns to it.
    """
    types, loop_types = graph.types, graph.loop_types
    phases: list[int] = []
    leader: list[int] = []  # a node of the same subgraph, finally its first one

    def find(node: int) -> int:
        while leader[node] != node:
            leader[node] = leader[leader[node]]
            node = leader[node]
        return node

    for node, before in enumerate(graph.predecessors):
        type, phase = types[node], 0
        is_alone = type in loop_types
        for other in before:
            reached = phases[other] + (is_alone or types[other] != type)
            if reached > phase:
                phase = reached
        phases.append(phase)
        leader.append(node)
        if is_alone:
            continue
        for other in before:
            if types[other] == type and phases[other] == phase:
                a, b = find(node), find(other)
                leader[max(a, b)] = min(a, b)
    return [find(node) for node in range(len(types))], phases


def _only(successors: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the successor of each node if it has one, else `NO_SUCCESSOR` or `SEVERAL`."""
    return np.array(
        [some[0] if len(some) == 1 else SEVERAL if some else NO_SUCCESSOR for some in successors],
        np.int64,
    )


def _lines(
    inner: np.ndarray, outer: np.ndarray, num_inner: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows 4 and 5 of `Links`."""
    numbers = np.arange(len(inner))
    goes_on = (inner == numbers + 1) & (outer == NO_SUCCESSOR)
    goes_on[:-1] &= num_inner[1:] == 1
    ends = np.flatnonzero(~goes_on)
    last = ends[np.searchsorted(ends, numbers)]
    frees = (inner[last] != NO_SUCCESSOR) | (outer[last] != NO_SUCCESSOR)
    ahead = last - numbers
    return ahead, np.where(frees, ahead + 1, _ANY_NUMBER)
