"""Graphs of cells as schedulers see them: integers, and their partition into subgraphs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias, final

_Edges: TypeAlias = "tuple[tuple[int, ...], ...]"
# See `CellGraph`.
_Structure: TypeAlias = "tuple[tuple[int, ...], _Edges, tuple[int, ...], frozenset[int]]"


@final
class CellGraph:
    """The structure of a request's graph. Nodes are numbered from 0, dependencies first.

    Instances never change and are shared by graphs of the same structure (`cell_graph`).

    Attributes:
      types: index of the cell type of each node.
      predecessors: for each node the nodes whose outputs it takes, each once.
      max_steps: most times that each node runs; 1 except for loops.
      loop_types: the types that are loops.
    """

    def __init__(
        self,
        types: tuple[int, ...],
        predecessors: _Edges,
        max_steps: tuple[int, ...],
        loop_types: frozenset[int] = frozenset(),
    ):
        self.types = types
        self.predecessors = predecessors
        self.max_steps = max_steps
        self.loop_types = loop_types

    def __len__(self) -> int:
        return len(self.types)

    def prepare(self) -> None:
        """Compute the partition and its edges now, so that no scheduler waits for them."""
        _ = self.inner_dependencies, self.inner_successors, self.outer_successors

    @cached_property
    def successors(self) -> _Edges:
        """For each node, the nodes that take its outputs."""
        found: list[list[int]] = [[] for _ in self.types]
        for node, before in enumerate(self.predecessors):
            for other in before:
                found[other].append(node)
        return tuple(map(tuple, found))

    @cached_property
    def first(self) -> tuple[int, ...]:
        """The nodes without predecessors."""
        return tuple(node for node, before in enumerate(self.predecessors) if not before)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """For each node, the number of edges on the longest path to it."""
        depths: list[int] = []
        for before in self.predecessors:
            depths.append(1 + max((depths[other] for other in before), default=-1))
        return tuple(depths)

    @cached_property
    def subgraphs(self) -> tuple[Subgraph, ...]:
        """The partition into subgraphs, see `Subgraph`; a subgraph follows those it depends on."""
        return _partition(self)

    @cached_property
    def subgraph_of(self) -> tuple[int, ...]:
        """For each node, the index of its subgraph."""
        found = [0] * len(self.types)
        for index, subgraph in enumerate(self.subgraphs):
            for node in subgraph.nodes:
                found[node] = index
        return tuple(found)

    @cached_property
    def inner_dependencies(self) -> tuple[int, ...]:
        """For each node, the number of its predecessors in its own subgraph."""
        of = self.subgraph_of
        return tuple(
            sum(of[other] == of[node] for other in before)
            for node, before in enumerate(self.predecessors)
        )

    @cached_property
    def inner_successors(self) -> _Edges:
        """For each node, its successors in its own subgraph."""
        of = self.subgraph_of
        return tuple(
            tuple(other for other in after if of[other] == of[node])
            for node, after in enumerate(self.successors)
        )

    @cached_property
    def outer_successors(self) -> _Edges:
        """For each node, the subgraph of each of its successors in other subgraphs."""
        of = self.subgraph_of
        return tuple(
            tuple(of[other] for other in after if of[other] != of[node])
            for node, after in enumerate(self.successors)
        )


@final
class Subgraph:
    """Connected nodes of one type whose other dependencies lie wholly before them (thesis, 2.4.3).

    A loop's node is a subgraph of its own.

    Attributes:
      type: index of the cell type.
      nodes: its nodes, dependencies first.
      first: the nodes without a predecessor in the subgraph.
      num_dependencies: edges from nodes of other subgraphs. The subgraph may run when the nodes at
        their beginnings have.
    """

    __slots__ = ("type", "nodes", "first", "num_dependencies")

    def __init__(
        self, type: int, nodes: tuple[int, ...], first: tuple[int, ...], num_dependencies: int
    ):
        self.type = type
        self.nodes = nodes
        self.first = first
        self.num_dependencies = num_dependencies


@final
class _Structures:
    """The structures of the newest graphs, at most `max_nodes` nodes of them. It is thread-safe."""

    def __init__(self, max_nodes: int):
        self._max_nodes = max_nodes
        self._num_nodes = 0
        self._graphs: OrderedDict[_Structure, CellGraph] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, structure: _Structure) -> CellGraph:
        """Return the graph of a structure."""
        with self._lock:
            found = self._graphs.get(structure)
            if found is None:
                found = self._graphs[structure] = CellGraph(*structure)
                self._num_nodes += len(found)
                while self._num_nodes > self._max_nodes:
                    self._num_nodes -= len(self._graphs.popitem(last=False)[1])
            else:
                self._graphs.move_to_end(structure)
            return found


# Trees hardly repeat, and what is kept costs the garbage collector time.
_structures = _Structures(1 << 14)


def cell_graph(
    types: tuple[int, ...],
    predecessors: _Edges,
    max_steps: tuple[int, ...],
    loop_types: frozenset[int] = frozenset(),
) -> CellGraph:
    """Return the graph of a structure; the same object as before if it was used lately."""
    return _structures.find((types, predecessors, max_steps, loop_types))


def chain_graph(type: int, num_nodes: int) -> CellGraph:
    """Return a graph in which each node of one type takes an output of the one before it."""
    before: _Edges = ((), *((node,) for node in range(num_nodes - 1)))
    return cell_graph((type,) * num_nodes, before, (1,) * num_nodes)


def _partition(graph: CellGraph) -> tuple[Subgraph, ...]:
    """Return the connected nodes of the same type and phase.

    A node's phase is that of its predecessors of the same type, or one more than that of its
    predecessors of other types; the largest counts. So a path that leaves a subgraph never comes
    back to it, and every subgraph can wait for all that it needs from outside.
    """
    types = graph.types
    phases: list[int] = []
    leader: list[int] = []  # of each node: a node of the same subgraph, in the end its first one

    def find(node: int) -> int:
        while leader[node] != node:
            leader[node] = leader[leader[node]]
            node = leader[node]
        return node

    for node, before in enumerate(graph.predecessors):
        type, phase = types[node], 0
        is_alone = type in graph.loop_types
        for other in before:
            reached = phases[other] + (is_alone or types[other] != type)
            if reached > phase:
                phase = reached
        phases.append(phase)
        leader.append(node)
        for other in before:
            if types[other] == type and phases[other] == phase and not is_alone:
                a, b = find(node), find(other)
                leader[max(a, b)] = min(a, b)
    members: dict[int, list[int]] = {}
    for node in range(len(types)):
        members.setdefault(find(node), []).append(node)
    parts = sorted(members.values(), key=lambda nodes: phases[nodes[0]])
    return tuple(_subgraph(graph, nodes) for nodes in parts)


def _subgraph(graph: CellGraph, nodes: Sequence[int]) -> Subgraph:
    inside = set(nodes)
    first, num_dependencies = [], 0
    for node in nodes:
        before = graph.predecessors[node]
        num_inner = sum(other in inside for other in before)
        num_dependencies += len(before) - num_inner
        if num_inner == 0:
            first.append(node)
    return Subgraph(graph.types[nodes[0]], tuple(nodes), tuple(first), num_dependencies)
