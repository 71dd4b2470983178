"""Preempt the sequence that is expected to need memory for longest."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import final

from jaxserve.scheduling.lengths.tracker import LengthTracker
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class LongestRemaining:
    """Preempt by expected remaining tokens, given those that have come.

    An answer that is almost complete stays: it frees its memory soon. Without any estimate the last
    in order is preempted. One with a latency bound of its own stays as long as there are others.
    """

    keeps_state: bool = True

    def victim(self, candidates: Seq[Sequence], lengths: LengthTracker) -> Sequence:
        candidates = [s for s in candidates if s.request.due_s is None] or candidates
        forecast = lengths.forecast(candidates)
        if forecast is None:
            return candidates[-1]
        remaining = forecast.expected_remaining()
        # Of several with the same expectation, the last in order.
        return candidates[len(candidates) - 1 - int(remaining[::-1].argmax())]
