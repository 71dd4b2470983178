"""The shortest predicted answer first, with ageing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from jaxserve.scheduling.lengths.tracker import LengthTracker
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class ShortestPredictedFirst:
    """Order by expected output length: the mean latency is least if short answers do not wait.

    An expected token is a delay of `ageing_s` seconds, so a sequence is overtaken only by those
    that arrive less than its expected length times `ageing_s` later. No answer counts as
    longer than its limit, which also stands in for a missing estimate.
    """

    heeds_bounds: ClassVar[bool] = False
    heeds_priority: ClassVar[bool] = False

    ageing_s: float = 0.1
    max_passes: int = 0

    def key(self, sequence: Sequence, lengths: LengthTracker) -> tuple[float, float, int]:
        arrival_s = sequence.request.arrival_s
        expected = float(sequence.max_length - sequence.prompt_length)
        estimate = lengths.estimate(sequence)
        if estimate is not None:
            expected = min(estimate.expected_length, expected)
        return arrival_s + self.ageing_s * expected, arrival_s, sequence.key
