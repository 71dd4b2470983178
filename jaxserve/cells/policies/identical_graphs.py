"""A graph written down for one structure: the ideal that BatchMaker is compared with (2.7.5)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import final

from jaxserve.cells.cell_graph import CellGraph
from jaxserve.cells.policies.graph_batches import (
    Buckets,
    GraphBatchScheduler,
    by_position,
    check_max_graphs,
)
from jaxserve.cells.policy import CellType


@final
@dataclass(frozen=True, kw_only=True)
class IdenticalGraphs:
    """Batches of graphs of one structure; each task has the same node of every graph.

    With one structure in the workload there is nothing to merge and nothing to pad: the ideal line
    of figure 2.15. A tree of 16 leaves is 31 tasks, and none has two nodes of one tree.

    Attributes:
      max_graphs: the most graphs of a batch; by default the smallest `max_batch` of the types.
    """

    max_graphs: int | None = None

    def __post_init__(self) -> None:
        if self.max_graphs is not None:
            check_max_graphs(self.name, self.max_graphs)

    @property
    def name(self) -> str:
        return "identical_graphs"

    def new_scheduler(self, types: Sequence[CellType], num_workers: int) -> GraphBatchScheduler:
        most = min(type.max_batch for type in types)
        max_graphs = most if self.max_graphs is None else min(self.max_graphs, most)
        waiting = Buckets(_structure_of, max_graphs, is_round_robin=False)
        return GraphBatchScheduler(types, num_workers, waiting, by_position)


def _structure_of(graph: CellGraph) -> Hashable:
    return graph.types, graph.predecessors
