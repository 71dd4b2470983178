"""Requests with a latency bound first, the earliest due first; then first come, first served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from jaxserve.scheduling.lengths.tracker import LengthTracker
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class DueFirst:
    """Order by the time at which a request is due: the earliest deadline first.

    With bounds of its own that is `Request.due_s`. A request without one is due `ageing_s` seconds
    after its arrival, as is one with a longer bound. So it is overtaken only by requests that
    arrive less than `ageing_s` after it. Where no request has a bound, this is first come, first
    served.
    """

    heeds_bounds: ClassVar[bool] = True
    heeds_priority: ClassVar[bool] = False

    ageing_s: float = 300.0

    def key(self, sequence: Sequence, lengths: LengthTracker) -> tuple[float, float, int]:
        request = sequence.request
        due_s = request.arrival_s + self.ageing_s
        if request.due_s is not None:
            due_s = min(due_s, request.due_s)
        return due_s, request.arrival_s, sequence.key

    @property
    def max_passes(self) -> int:
        return 0
