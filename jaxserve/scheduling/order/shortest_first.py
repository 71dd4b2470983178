"""The shortest predicted answer first, with ageing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxserve.scheduling.lengths.tracker import LengthTracker
from jaxserve.scheduling.sequence import Sequence

# Tokens of an answer without an estimate and without a limit.
_LONGEST = 4096


@final
@dataclass(frozen=True)
class ShortestPredictedFirst:
    """Order by expected output length: the mean latency is least if short answers do not wait.

    An expected token is a delay of `ageing_s` seconds, so a sequence is overtaken only by those
    that arrive less than its expected length times `ageing_s` later. Without an estimate an answer
    counts as long as its own limit.
    """

    ageing_s: float = 0.1
    max_passes: int = 0

    def key(self, sequence: Sequence, lengths: LengthTracker) -> tuple[float, float, int]:
        request = sequence.request
        estimate = lengths.estimate(sequence)
        if estimate is None:
            expected = float(request.params.max_tokens or _LONGEST)
        else:
            expected = estimate.expected_length
        return (request.arrival_s + self.ageing_s * expected, request.arrival_s, sequence.key)
