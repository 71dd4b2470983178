"""Reserve exactly what the answer will need."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import final

from jaxserve.core.config import EngineConfig
from jaxserve.scheduling.admission.watermark import Watermark
from jaxserve.scheduling.lengths.tracker import LengthTracker
from jaxserve.scheduling.policy import PreemptionCost
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class Oracle:
    """Reserve by forced lengths: an upper bound for every prediction of lengths.

    An answer without a forced length is reserved to its limit.
    """

    def reserve_tokens(self, sequence: Sequence, lengths: LengthTracker) -> int:
        return sequence.request.end_length(sequence.max_length, sequence.sample_index)

    def headroom(
        self,
        running: Seq[Sequence],
        config: EngineConfig,
        lengths: LengthTracker,
        preemption: PreemptionCost,
    ) -> Watermark:
        return Watermark(0)

    @property
    def extends(self) -> bool:
        return True
