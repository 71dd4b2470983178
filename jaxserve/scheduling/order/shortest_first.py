"""The shortest predicted answer first, with ageing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxserve.core.prediction import stacked
from jaxserve.scheduling.sequence import Sequence

# Tokens of an answer of which nothing is known, not even a limit.
_LONGEST = 4096


@final
@dataclass(frozen=True)
class ShortestPredictedFirst:
    """Orders by expected output length: mean latency is least when short answers do not wait.

    An expected token is a delay of `ageing_s`, so a request is overtaken only by those that arrive
    less than its expected length times that later. Without a prediction a request counts as the
    longest.
    """

    ageing_s: float = 0.1
    max_passes: int = 0

    def key(self, sequence: Sequence) -> tuple[float, float, int]:
        request = sequence.request
        if request.prediction is None:
            expected = float(sequence.request.params.max_tokens or _LONGEST)
        else:
            expected = float(stacked([request.prediction]).expected_remaining()[0])
        return (request.arrival_s + self.ageing_s * expected, request.arrival_s, sequence.key)
