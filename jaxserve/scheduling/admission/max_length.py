"""Reserve for the longest possible answer, as ORCA and FasterTransformer do."""

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
class MaxLength:
    """Reserve the limit of each sequence: none outgrows its reservation, so none is preempted."""

    def reserve_tokens(self, sequence: Sequence, lengths: LengthTracker) -> int:
        return sequence.max_length

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
