"""Admit a sequence if memory is expected to suffice at every time to come."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.scheduling.admission.on_demand import OnDemand
from jaxserve.scheduling.lengths.tracker import LengthTracker
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class Expected:
    """Take pages as tokens come; admit by the expected peak of the memory in use.

    Answers end at different times, so the memory that all of them need together peaks far below
    the sum of their final lengths. The peak follows from their estimated lengths, each conditioned
    on the tokens that have come. (Gong et al., "Past-Future Scheduler", arXiv:2507.10150, estimate
    it from past lengths; here every sequence has its own distribution.)

    Without any estimate this is `on_demand`.

    Attributes:
      margin: standard deviations of the memory in use that stay free at the peak.
    """

    margin: float = 1.0

    def reserve_tokens(self, sequence: Sequence, lengths: LengthTracker) -> int:
        return sequence.planned_length + 1

    def headroom_pages(
        self,
        sequence: Sequence,
        running: Seq[Sequence],
        config: EngineConfig,
        lengths: LengthTracker,
    ) -> int:
        if not running:
            return 0
        together = [*running, sequence]
        forecast = lengths.forecast(together)
        if forecast is None:
            return OnDemand().headroom_pages(sequence, running, config, lengths)
        held = np.asarray([each.planned_length + 1 for each in together], np.float64)
        # The last page of a sequence is on average half empty.
        peak = forecast.peak_tokens(held + config.page_size / 2, self.margin)
        now = sum(each.kv.table.reservation for each in running)
        now += sequence.kv.table.pages_for(self.reserve_tokens(sequence, lengths))
        return max(0, math.ceil(peak / config.page_size) - now)

    @property
    def extends(self) -> bool:
        return True
