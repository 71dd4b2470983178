"""Reserve the predicted length of an answer, as S3 does."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import final

from jaxserve.core.config import EngineConfig
from jaxserve.scheduling.admission.watermark import Watermark
from jaxserve.scheduling.lengths.estimate import LengthEstimate
from jaxserve.scheduling.lengths.tracker import LengthTracker
from jaxserve.scheduling.policy import PreemptionCost
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class Predicted:
    """Length-aware reservations (S3, section 3.2).

    By default as in the paper: the longest length of the likeliest bucket. A sequence that uses up
    its reservation is preempted; its next reservation is twice as large, or what a probe has read
    since, whichever is more. So the number of its preemptions is bounded by the logarithm of its
    length, also where every reading is too short. Without any estimate the reservation is for the
    longest answer, as in ORCA.

    Attributes:
      miss_rate: reserve instead a length that at most this share of answers outgrows, given the
        tokens that have come.
      extends: a sequence that outgrows its reservation takes free pages, and is preempted only if
        there are none.
    """

    miss_rate: float | None = None
    extends: bool = False

    def reserve_tokens(self, sequence: Sequence, lengths: LengthTracker) -> int:
        newest = lengths.estimate(sequence)
        first = lengths.first_estimate(sequence)
        if newest is None or first is None:
            return sequence.max_length
        wanted = self._length(sequence, newest, sequence.num_planned_outputs)
        if newest is first:
            return wanted << sequence.kv.num_outgrown
        if sequence.kv.num_outgrown:
            wanted = max(wanted, self._length(sequence, first, 0) << sequence.kv.num_outgrown)
        return wanted

    def headroom(
        self,
        running: Seq[Sequence],
        config: EngineConfig,
        lengths: LengthTracker,
        preemption: PreemptionCost,
    ) -> Watermark:
        return Watermark(0)

    def _length(self, sequence: Sequence, estimate: LengthEstimate, num_outputs: int) -> int:
        """Return the estimated length of prompt and answer, which has `num_outputs` tokens."""
        if self.miss_rate is None:
            return sequence.prompt_length + estimate.likeliest_length
        answer = estimate.quantile(self.miss_rate, num_outputs)
        return sequence.prompt_length + answer
