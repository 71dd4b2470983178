"""Highest priority first, with ageing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from jaxserve.scheduling.lengths.tracker import LengthTracker
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class Priority:
    """Order by priority (higher first), then deadline (earlier first), then arrival; with ageing.

    A level of priority is a head start of `ageing_s` seconds, and a deadline is one of at most
    `ageing_s`. A request is overtaken only by requests that arrive less than
    `(1 + levels) * ageing_s` after it, where `levels` is the difference of their priorities; so no
    stream of urgent requests starves it. A deadline later than `ageing_s` has no effect. Requests
    that arrive together are in strict order of priority, then deadline.
    """

    heeds_bounds: ClassVar[bool] = False
    heeds_priority: ClassVar[bool] = True

    ageing_s: float = 300.0

    def key(self, sequence: Sequence, lengths: LengthTracker) -> tuple[float, float, int]:
        request = sequence.request
        due_s = request.arrival_s + self.ageing_s
        if request.deadline_s is not None:
            due_s = min(due_s, max(request.deadline_s, request.arrival_s))
        return (due_s - request.priority * self.ageing_s, request.arrival_s, sequence.key)

    @property
    def max_passes(self) -> int:
        return 0
