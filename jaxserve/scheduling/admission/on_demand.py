"""Reserve the present tokens and grow page by page, as vLLM does."""

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
class OnDemand:
    """Take pages as tokens come; when they run out, a sequence is preempted.

    Attributes:
      watermark: share of the pool that stays available at an admission, for running sequences to
        grow into before one is preempted.
    """

    watermark: float = 0.01

    def reserve_tokens(self, sequence: Sequence, lengths: LengthTracker) -> int:
        return sequence.planned_length + 1

    def headroom(
        self,
        running: Seq[Sequence],
        config: EngineConfig,
        lengths: LengthTracker,
        preemption: PreemptionCost,
    ) -> Watermark:
        return Watermark(int(self.watermark * (config.num_pages - 1)), is_idle=not running)

    @property
    def extends(self) -> bool:
        return True
