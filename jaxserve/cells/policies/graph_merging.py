"""Merging of dynamic graphs: DyNet's on-the-fly batching and TensorFlow Fold's batching."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, final

from jaxserve.cells.policies.graph_batches import (
    Buckets,
    GraphBatchScheduler,
    Member,
    check_max_graphs,
)
from jaxserve.cells.policy import CellType, Task
from jaxserve.core.errors import InvalidConfigError

ORDERS = ("agenda", "depth")


@final
@dataclass(frozen=True, kw_only=True)
class GraphMerging:
    """The first graphs that wait are merged into one, whose nodes of one type run together.

    `order` says which nodes:

    - "depth": those of one type and one depth, depth by depth (Looks et al., 2017, TensorFlow Fold;
      DyNet's `--dynet-autobatch 2`).
    - "agenda": all ready nodes of the type whose nodes have the least average depth, over all nodes
      of the merged graph (Neubig, Goldberg and Dyer, 2017; DyNet's `--dynet-autobatch 1`). A node
      waits for deeper ones of its type, so batches are larger than by depth.

    DyNet merges single operations and this merges cells, as Fold does, which needs less work.

    Attributes:
      max_graphs: 64 was best for both systems in the thesis (2.7.5). Merged batches of nodes may be
        larger; a type's `max_batch` limits them.
    """

    order: Literal["agenda", "depth"] = "agenda"
    max_graphs: int = 64

    def __post_init__(self) -> None:
        check_max_graphs(self.name, self.max_graphs)
        if self.order not in ORDERS:
            raise InvalidConfigError(f"order={self.order!r} is unknown; pass one of {ORDERS}")

    @property
    def name(self) -> str:
        return f"merged_by_{self.order}"

    def new_scheduler(self, types: Sequence[CellType], num_workers: int) -> GraphBatchScheduler:
        waiting = Buckets(lambda _: 0, self.max_graphs, is_round_robin=False)
        merge = {"agenda": by_agenda, "depth": by_depth}[self.order]
        return GraphBatchScheduler(types, num_workers, waiting, merge)


def by_depth(members: Sequence[Member], types: Sequence[CellType]) -> Iterator[Task]:
    groups: dict[tuple[int, int], list[int]] = {}
    for member in members:
        graph, first = member.graph, member.first
        for node, place in enumerate(zip(graph.depths, graph.types, strict=True)):
            groups.setdefault(place, []).append(first + node)
    for (_, type), nodes in sorted(groups.items()):
        yield from _steps(type, nodes, types)


def by_agenda(members: Sequence[Member], types: Sequence[CellType]) -> Iterator[Task]:
    """Yield all ready nodes of the type with the least average depth, repeatedly."""
    sum_depths, num_nodes = [0] * len(types), [0] * len(types)
    ready: list[list[tuple[int, int]]] = [[] for _ in types]
    num_left: list[list[int]] = []
    for index, member in enumerate(members):
        graph = member.graph
        num_left.append([len(before) for before in graph.predecessors])
        for node, type in enumerate(graph.types):
            sum_depths[type] += graph.depths[node]
            num_nodes[type] += 1
            if not graph.predecessors[node]:
                ready[type].append((index, node))
    means = [sums / max(1, num) for sums, num in zip(sum_depths, num_nodes, strict=True)]
    order = sorted(range(len(types)), key=means.__getitem__)
    while (type := next((type for type in order if ready[type]), None)) is not None:
        batch, ready[type] = ready[type], []
        yield from _steps(type, [members[index].first + node for index, node in batch], types)
        for index, node in batch:
            graph, left = members[index].graph, num_left[index]
            for after in graph.successors[node]:
                left[after] -= 1
                if left[after] == 0:
                    ready[graph.types[after]].append((index, after))


def _steps(type: int, nodes: list[int], types: Sequence[CellType]) -> Iterator[Task]:
    size = types[type].max_batch
    for start in range(0, len(nodes), size):
        yield Task(type, nodes[start : start + size], 0)
