"""Bubbles of a pipeline, from the order in which passes were submitted to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from jaxserve.execution.micro_batches import Pass


@final
@dataclass(frozen=True)
class Fill:
    """The times of a pipeline, in the unit of the costs.

    Attributes:
      total: from the start of the first pass to the end of the last.
      busy: of each stage.
      ideal: the least time of any order: the work of the busiest stage, and one pass through the
        other stages.
    """

    total: float
    busy: tuple[float, ...]
    ideal: float

    @property
    def bubble(self) -> float:
        """Share of the time in which the busiest stage is idle."""
        return 1 - max(self.busy) / self.total

    @property
    def ideal_bubble(self) -> float:
        return 1 - max(self.busy) / self.ideal


def play(passes: Sequence[Pass], costs: Sequence[float]) -> Fill:
    """Play passes back on stages that process them in order of submission, one at a time.

    A pass begins when the last pass that sampled for one of its slots has left the last stage.

    Args:
      costs: of a pass on each stage.
    """
    free = [0.0] * len(costs)
    sampled: dict[int, float] = {}
    for each in passes:
        ready = max((sampled.get(slot, 0.0) for slot in each.slots), default=0.0)
        for stage, cost in enumerate(costs):
            ready = free[stage] = max(ready, free[stage]) + cost
        if each.samples:
            sampled |= dict.fromkeys(each.slots, ready)
    busy = tuple(cost * len(passes) for cost in costs)
    return Fill(total=max(free), busy=busy, ideal=max(busy) + sum(costs) - max(costs))
