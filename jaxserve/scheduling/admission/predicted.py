"""Reserve what the answer is predicted to need, as S3 does."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import final

from jaxserve.core.config import EngineConfig
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class Predicted:
    """Length-aware reservations (S3, section 3.2).

    By default as in the paper: the longest length of the likeliest bucket; a sequence that uses its
    reservation up is preempted, and comes back with twice as much. Without a prediction the
    reservation is for the longest answer, as in ORCA.

    Attributes:
      miss_rate: reserve instead what at most this share of answers outgrows, given the tokens that
        have come.
      extends: a sequence that outgrows its reservation takes free pages, and is preempted only
        where there are none.
    """

    miss_rate: float | None = None
    extends: bool = False

    def reserve_tokens(self, sequence: Sequence) -> int:
        prediction = sequence.request.prediction
        if prediction is None:
            return sequence.max_length
        if self.miss_rate is None:
            answer = prediction.likeliest_length
        else:
            answer = prediction.quantile(self.miss_rate, sequence.num_planned_outputs)
        return (sequence.prompt_length + answer) << sequence.kv.num_outgrown

    def headroom_pages(
        self, sequence: Sequence, running: Seq[Sequence], config: EngineConfig
    ) -> int:
        return 0
