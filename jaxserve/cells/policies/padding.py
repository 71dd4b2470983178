"""Padding to a common length in buckets: TensorFlow, MXNet and PyTorch (thesis, 2.2.3, 2.7.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final
from weakref import WeakKeyDictionary

from jaxserve.cells.cell_graph import CellGraph
from jaxserve.cells.policies.graph_batches import (
    Buckets,
    GraphBatchScheduler,
    Member,
    check_max_graphs,
    max_graphs_of,
)
from jaxserve.cells.policy import CellType, Task
from jaxserve.core.errors import InvalidConfigError, InvalidGraphError

# The parts of a chain: a type, and the consecutive nodes of this type.
_Parts: TypeAlias = "tuple[tuple[int, tuple[int, ...]], ...]"


@final
@dataclass(frozen=True, kw_only=True)
class Padding:
    """Batches of chains of similar lengths, all padded to the longest length of their bucket.

    Bucket i has lengths from `i * bucket_width + 1` to `(i + 1) * bucket_width`, and buckets take
    turns. There is no timeout: a batch that is not full starts when the worker is idle and it is
    its bucket's turn, which the thesis found better than any timeout. A loop at a chain's end runs
    until its last row has ended, with all rows.

    A graph is a chain of cells, of one type or of several types in sequence. Each part has its own
    bucket, so that an unfolded decoder is padded like the encoder.

    Attributes:
      bucket_width: 10 was best in the thesis.
      to_longest: whether rows are padded to the longest row of their batch, as loops of TensorFlow
        and PyTorch do. Otherwise to the longest length of the bucket, for which the thesis
        materialised a graph.
      max_graphs: the most rows; by default the smallest `max_batch` of the cell types.
    """

    bucket_width: int = 10
    to_longest: bool = False
    max_graphs: int | None = None

    def __post_init__(self) -> None:
        if self.bucket_width < 1:
            raise InvalidConfigError(
                f"policy {self.name!r}: bucket_width={self.bucket_width} is not allowed; pass at "
                "least 1"
            )
        check_max_graphs(self.name, self.max_graphs)

    @property
    def name(self) -> str:
        return f"padding_{self.bucket_width}" + ("_to_longest" if self.to_longest else "")

    def new_scheduler(self, types: Sequence[CellType], num_workers: int) -> GraphBatchScheduler:
        """Return a scheduler; its `add` raises InvalidGraphError for graphs that are not chains."""
        is_loop = tuple(type.is_loop for type in types)
        width = self.bucket_width
        max_graphs = max_graphs_of(self.max_graphs, types)
        parts_of: WeakKeyDictionary[CellGraph, _Parts] = WeakKeyDictionary()

        def parts(graph: CellGraph) -> _Parts:
            found = parts_of.get(graph)
            if found is None:
                found = parts_of[graph] = _parts(graph, is_loop)
            return found

        def bucket_of(graph: CellGraph) -> tuple[tuple[int, int], ...]:
            return tuple(
                (type, 1 if is_loop[type] else -(-len(nodes) // width))
                for type, nodes in parts(graph)
            )

        def padded(members: Sequence[Member], types: Sequence[CellType]) -> list[Task]:
            rows = [(member.first, parts(member.graph)) for member in members]
            tasks = []
            for index, (type, number) in enumerate(bucket_of(members[0].graph)):
                longest = max(len(own[index][1]) for _, own in rows)
                for place in range(longest if self.to_longest or is_loop[type] else number * width):
                    nodes = [
                        first + own[index][1][place]
                        for first, own in rows
                        if place < len(own[index][1])
                    ]
                    tasks.append(Task(type, nodes, 0, len(rows) - len(nodes)))
            return tasks

        waiting = Buckets(bucket_of, max_graphs, is_round_robin=True)
        return GraphBatchScheduler(types, num_workers, waiting, padded, keeps_rows=True)


def _parts(graph: CellGraph, is_loop: tuple[bool, ...]) -> _Parts:
    parts: list[tuple[int, list[int]]] = []
    for node, type in enumerate(graph.types):
        if graph.predecessors[node] != ((node - 1,) if node else ()):
            raise InvalidGraphError(
                "a graph that is not a chain cannot be padded; pass a chain, in which each node "
                "takes outputs of the node before it, or run it under another policy"
            )
        if parts and parts[-1][0] == type and not is_loop[type]:
            parts[-1][1].append(node)
        else:
            parts.append((type, [node]))
    return tuple((type, tuple(nodes)) for type, nodes in parts)
