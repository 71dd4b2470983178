"""TIE: short answers first, by a mean that heeds the tail."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class TailInflated:
    """TIE: order by the expected length and the risk of a long answer (arXiv:2604.00499).

    The score is the mean length plus beta times the mean of the longest `tail_share` of answers
    (equation 11). Beta grows with the queue from 0.1 to 0.5: it is 0.1 Q / B for Q waiting requests
    and a batch of B (equation 12). A score falls by the factor `decay` in every `decay_s` of
    waiting (section 5). All fall alike, so stored keys compare at any time; a sequence is overtaken
    only by those that arrive less than `decay_s * log(ratio of the scores) / -log(decay)` later.

    Assumed: the distribution is that of our predictor, where the paper fits a log-t distribution
    with 3.5 degrees of freedom. Q is the requests with an estimate beyond a batch, since an order
    sees no queue. Equation 12, the values of `decay` and `decay_s`, and that a missing estimate is
    the limit of the length are from the authors' code.

    Attributes:
      batch: B.
    """

    heeds_bounds: ClassVar[bool] = False
    heeds_priority: ClassVar[bool] = False
    max_passes = 0

    tail_share: float = 0.1
    batch: int = 32
    decay: float = 0.9
    decay_s: float = 30.0

    def key(self, sequence: Sequence, lengths: LengthTracker) -> tuple[float, float, int]:
        arrival_s = sequence.request.arrival_s
        score = longest = float(sequence.max_length - sequence.prompt_length)
        estimate = lengths.estimate(sequence)
        if estimate is not None:
            beta = min(max(0.1 * (len(lengths) - self.batch) / self.batch, 0.1), 0.5)
            tail = min(estimate.tail_mean(self.tail_share), longest)
            score = min(estimate.expected_length, longest) + beta * tail
        waits_from = arrival_s * -math.log(self.decay) / self.decay_s
        return math.log(max(score, 1.0)) + waits_from, arrival_s, sequence.key
