"""How full a pipeline is kept by the order in which passes were submitted to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from jaxserve.execution.staged import Pass


@final
@dataclass(frozen=True)
class Fill:
    """Times in units of the costs given.

    Attributes:
      total: from the first pass's start to the last one's end.
      busy: of each stage.
      ideal: the least that any order could take: the busiest stage's work, and the first pass's
        way to it and from it.
    """

    total: float
    busy: tuple[float, ...]
    ideal: float

    @property
    def bubble(self) -> float:
        """Share of the stages' time that they stood idle, the busiest one's."""
        return 1 - max(self.busy) / self.total

    @property
    def ideal_bubble(self) -> float:
        return 1 - max(self.busy) / self.ideal


def play(passes: Sequence[Pass], costs: Sequence[float]) -> Fill:
    """Play passes back on stages that work in order of submission, one pass at a time each.

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
