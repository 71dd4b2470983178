"""Graphs of cells as schedulers see them: integers, and their partition into subgraphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias, final

import numpy as np

from jaxserve.cells.links import Links, SubgraphEntry, chain_links, links_of
from jaxserve.cells.lru_cache import LRUCache
from jaxserve.cells.tree_shape import TreeShape, tree_links

_Edges: TypeAlias = "tuple[tuple[int, ...], ...]"
# See `CellGraph`.
_Structure: TypeAlias = "tuple[tuple[int, ...], _Edges, tuple[int, ...], frozenset[int]]"


@final
class CellGraph:
    """The structure of a request's graph. Nodes are numbered from 0, dependencies first.

    Instances never change and are shared by graphs of the same structure (`cell_graph`).

    Attributes:
      types: index of the cell type of each node.
      max_steps: most times that each node runs; 1 except for loops.
      loop_types: the types that are loops.

    Args:
      predecessors: a function that returns them, for graphs whose schedulers may not need them.
      links: its links, if they are known.
    """

    def __init__(
        self,
        types: tuple[int, ...],
        predecessors: _Edges | Callable[[], _Edges],
        max_steps: tuple[int, ...],
        loop_types: frozenset[int] = frozenset(),
        *,
        links: Links | None = None,
    ):
        self.types = types
        self.max_steps = max_steps
        self.loop_types = loop_types
        self._given_predecessors = predecessors
        self._given_links = links

    def __len__(self) -> int:
        return len(self.types)

    def prepare(self, num_workers: int) -> None:
        """Compute what a scheduler of a number of workers reads; any thread may call it."""
        _ = self.links if num_workers == 1 else self._partition

    @cached_property
    def predecessors(self) -> _Edges:
        """For each node the nodes whose outputs it takes, each once."""
        given = self._given_predecessors
        return given() if callable(given) else given

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
    def subgraphs(self) -> tuple[Subgraph, ...]:
        """The partition into subgraphs; a subgraph follows those it depends on."""
        alone = [Subgraph(type, (node,), (node,), 0) for type, some in self.starts for node in some]
        return *alone, *self.later_subgraphs

    @property
    def starts(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """(type, nodes) of nodes without dependencies that are single subgraphs, except loops.

        All nodes of one type are in one entry, such as the leaves of a tree.
        """
        return self._partition.starts

    @property
    def num_starts(self) -> int:
        return self._partition.num_starts

    @property
    def later_subgraphs(self) -> tuple[Subgraph, ...]:
        return self._partition.later_subgraphs

    @cached_property
    def subgraph_of(self) -> tuple[int, ...]:
        return self._partition.subgraph_of

    @cached_property
    def inner_dependencies(self) -> tuple[int, ...]:
        return self._partition.inner_dependencies

    @cached_property
    def inner_successors(self) -> _Edges:
        return self._partition.inner_successors

    @cached_property
    def outer_successors(self) -> _Edges:
        """For each node, the subgraph of each of its successors in other subgraphs."""
        return self._partition.outer_successors

    @cached_property
    def links(self) -> Links:
        if self._given_links is not None:
            return self._given_links
        parts = self._partition
        starts = [SubgraphEntry(some[0], type, np.array(some), 0) for type, some in parts.starts]
        later = [
            SubgraphEntry(part.nodes[0], part.type, np.array(part.first), part.num_dependencies)
            for part in parts.later_subgraphs
        ]
        heads = [entry.head for entry in later]
        return links_of(
            parts.inner_successors,
            [[heads[to - parts.num_starts] for to in some] for some in parts.outer_successors],
            parts.inner_dependencies,
            self.max_steps,
            (*starts, *later),
        )

    @cached_property
    def _partition(self) -> _Partition:
        return _partition(self)


class _Partition(NamedTuple):
    starts: tuple[tuple[int, tuple[int, ...]], ...]
    num_starts: int
    later_subgraphs: tuple[Subgraph, ...]
    subgraph_of: tuple[int, ...]
    inner_dependencies: tuple[int, ...]
    inner_successors: _Edges
    outer_successors: _Edges


@final
class Subgraph:
    """Connected nodes of one type whose other dependencies are all before them (thesis, 2.4.3).

    A loop's node is a subgraph by itself. Nodes are in order, dependencies first; `first` are those
    without a predecessor in the subgraph. It may run when all nodes at the other ends of its
    `num_dependencies` edges from outside have run.
    """

    __slots__ = ("type", "nodes", "first", "num_dependencies")

    def __init__(
        self, type: int, nodes: tuple[int, ...], first: tuple[int, ...], num_dependencies: int
    ):
        self.type = type
        self.nodes = nodes
        self.first = first
        self.num_dependencies = num_dependencies


# Sentences have few distinct lengths. Trees rarely repeat, and cost the garbage collector time.
_structures: LRUCache[_Structure, CellGraph] = LRUCache(1 << 14)
_chains: LRUCache[tuple[int, int], CellGraph] = LRUCache(1 << 14)  # by type and length


def cell_graph(
    types: tuple[int, ...],
    predecessors: _Edges,
    max_steps: tuple[int, ...],
    loop_types: frozenset[int] = frozenset(),
) -> CellGraph:
    """Return the graph of a structure; the same object as before while it is cached."""
    key = types, predecessors, max_steps, loop_types
    found = _structures.get(key)
    return found or _structures.add(key, CellGraph(*key), len(types))


def tree_graph(leaf_type: int, pair_type: int, shape: TreeShape) -> CellGraph:
    num_leaves = len(shape.pairs) + 1
    types, max_steps = _nodes_of_trees(leaf_type, pair_type, num_leaves)
    return CellGraph(
        types,
        lambda: (*[()] * num_leaves, *map(tuple, shape.pairs.tolist())),
        max_steps,
        links=tree_links(leaf_type, pair_type, shape),
    )


@lru_cache(maxsize=1024)
def _nodes_of_trees(
    leaf_type: int, pair_type: int, num_leaves: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    types = (leaf_type,) * num_leaves + (pair_type,) * (num_leaves - 1)
    return types, (1,) * len(types)


def chain_graph(type: int, num_nodes: int) -> CellGraph:
    found = _chains.get((type, num_nodes))
    if found is not None:
        return found
    graph = CellGraph(
        (type,) * num_nodes,
        lambda: ((), *((node,) for node in range(num_nodes - 1))),
        (1,) * num_nodes,
        links=chain_links(type, num_nodes),
    )
    return _chains.add((type, num_nodes), graph, num_nodes)


def _partition(graph: CellGraph) -> _Partition:
    """Return the connected nodes of the same type and phase, and the edges in and between them.

    A node's phase is the maximum over its predecessors of their phase (same type) or their phase
    plus one (other types). So a path that leaves a subgraph never returns to it.
    """
    types, loop_types = graph.types, graph.loop_types
    leaders, phases = _leaders(graph)
    roots = [node for node, leader in enumerate(leaders) if node == leader]
    is_single = [True] * len(types)
    for node, leader in enumerate(leaders):
        if node != leader:
            is_single[leader] = False
    starts: dict[int, list[int]] = {}
    later: list[int] = []
    for root in roots:
        if is_single[root] and not graph.predecessors[root] and types[root] not in loop_types:
            starts.setdefault(types[root], []).append(root)
        else:
            later.append(root)
    later.sort(key=phases.__getitem__)
    index_of = {root: i for i, root in enumerate(itertools.chain(*starts.values(), later))}
    num_starts = len(roots) - len(later)
    of = [index_of[leader] for leader in leaders]
    nodes: list[list[int]] = [[] for _ in roots]
    first: list[list[int]] = [[] for _ in roots]
    num_outer = [0] * len(roots)
    num_inner = [0] * len(types)
    inner: list[list[int]] = [[] for _ in types]
    outer: list[list[int]] = [[] for _ in types]
    for node, before in enumerate(graph.predecessors):
        own = of[node]
        nodes[own].append(node)
        for other in before:
            if of[other] == own:
                inner[other].append(node)
                num_inner[node] += 1
            else:
                outer[other].append(own)
                num_outer[own] += 1
        if not num_inner[node]:
            first[own].append(node)
    return _Partition(
        starts=tuple((type, tuple(some)) for type, some in starts.items()),
        num_starts=num_starts,
        later_subgraphs=tuple(
            Subgraph(types[root], tuple(nodes[index]), tuple(first[index]), num_outer[index])
            for index, root in enumerate(later, num_starts)
        ),
        subgraph_of=tuple(of),
        inner_dependencies=tuple(num_inner),
        inner_successors=tuple(map(tuple, inner)),
        outer_successors=tuple(map(tuple, outer)),
    )


def _leaders(graph: CellGraph) -> tuple[list[int], list[int]]:
    """Return for each node the first node of its subgraph, and its phase."""
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
