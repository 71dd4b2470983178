"""The sequence that is expected to need memory for longest goes first."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import final

from jaxserve.scheduling.forecast import Forecast
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class LongestRemaining:
    """Goes by expected remaining tokens, given those that have come; the last in order without.

    Answers that are nearly at their end are left alone: they give their memory back soon.
    """

    keeps_state: bool = True

    def victim(self, candidates: Seq[Sequence]) -> Sequence:
        forecast = Forecast.of(candidates)
        if forecast is None:
            return candidates[-1]
        remaining = forecast.expected_remaining()
        # Of equals the last in order.
        return candidates[len(candidates) - 1 - int(remaining[::-1].argmax())]
