"""First come, first served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from jaxserve.scheduling.lengths.tracker import LengthTracker
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class FCFS:
    """Order by arrival; a preempted sequence keeps its place."""

    heeds_bounds: ClassVar[bool] = False
    heeds_priority: ClassVar[bool] = False

    def key(self, sequence: Sequence, lengths: LengthTracker) -> tuple[float, int]:
        return (sequence.request.arrival_s, sequence.key)

    @property
    def max_passes(self) -> int:
        return 0
