"""Highest priority first, within a bound on how long others wait for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class Priority:
    """Orders by priority (higher first), then deadline (earlier first), then arrival; with ageing.

    A level of priority is a head start of `ageing_s`, and so at most is a deadline. A
    request is overtaken only by requests that arrive less than `(1 + levels) * ageing_s` after it,
    `levels` being how far their priority is above its own; so no stream of urgent requests starves
    it. Deadlines further off than `ageing_s` count as none.
    Requests that arrive together are in strict order of priority, then deadline.
    """

    ageing_s: float = 300.0

    def key(self, sequence: Sequence) -> tuple[float, float, int]:
        request = sequence.request
        due_s = request.arrival_s + self.ageing_s
        if request.deadline_s is not None:
            due_s = min(due_s, max(request.deadline_s, request.arrival_s))
        return (due_s - request.priority * self.ageing_s, request.arrival_s, sequence.key)

    @property
    def max_passes(self) -> int:
        return 0
