"""UniBoost: arrival, less a boost for little work; no length is predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar, final

from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class Boosted:
    """UniBoost: order by arrival, less a boost that is large for little work (arXiv:2606.18431).

    No length is predicted. The boost of work that takes s seconds is that of gamma-Boost (Yu and
    Scully, arXiv:2404.08826, section 3): log(1 / (1 - exp(-gamma s))) / gamma. A large gamma is
    first come, first served; a small one orders by the work alone. A sequence is overtaken only by
    those that arrive less than the boost of one token after it.

    Assumed, since only the paper's abstract and its authors' page could be read: the formula of
    the boost, and that the work is what is known of it: the prompt, and the tokens that the answer
    has had when the sequence begins to wait (again). So a preempted answer comes back later the
    longer it is.

    Attributes:
      gamma: the knob, a second.
      prompt_token_s, token_s: seconds of work for a token of the prompt and of the answer.
    """

    heeds_bounds: ClassVar[bool] = False
    heeds_priority: ClassVar[bool] = False
    max_passes = 0

    gamma: float = 0.05
    prompt_token_s: float = 2e-4
    token_s: float = 0.02

    def key(self, sequence: Sequence, lengths: LengthTracker) -> tuple[float, float, int]:
        arrival_s = sequence.request.arrival_s
        return arrival_s - self.boost_s(sequence), arrival_s, sequence.key

    def boost_s(self, sequence: Sequence) -> float:
        prompt_s = self.prompt_token_s * sequence.prompt_length
        work_s = prompt_s + self.token_s * (1 + sequence.num_planned_outputs)
        return -math.log(-math.expm1(-self.gamma * work_s)) / self.gamma


@final
@dataclass(frozen=True)
class LatestBoosted:
    """Preempt by the boosted arrival, with the tokens that each answer has had by now.

    Long answers are preempted for short ones, and guarded by their age. UniBoost's preemption
    (arXiv:2606.18431) is "aware of the KV cache"; assumed is that the KV waits on the host.
    """

    boosted: Boosted = Boosted()
    keeps_state: bool = True

    def ranked(self, candidates: Seq[Sequence], lengths: LengthTracker) -> Seq[Sequence]:
        boosted = self.boosted
        return sorted(candidates, key=lambda each: boosted.key(each, lengths), reverse=True)
