"""No batching: one request after the other, one cell after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from jaxserve.cells.policies.graph_batches import Buckets, GraphBatchScheduler, by_position
from jaxserve.cells.policy import CellType


@final
@dataclass(frozen=True)
class OneAtATime:
    """The first request runs alone, its nodes in their order, one in a task."""

    @property
    def name(self) -> str:
        return "one_at_a_time"

    def new_scheduler(self, types: Sequence[CellType], num_workers: int) -> GraphBatchScheduler:
        waiting = Buckets(lambda _: 0, 1, is_round_robin=False)
        return GraphBatchScheduler(types, num_workers, waiting, by_position)
