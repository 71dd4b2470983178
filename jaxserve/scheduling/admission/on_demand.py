"""Reserve what is there and grow page by page, as vLLM does."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import final

from jaxserve.core.config import EngineConfig
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class OnDemand:
    """Pages are taken as tokens come; when they run out, the last in order is preempted.

    `watermark` of the pool stays available at an admission, so that those running can grow for a
    while before somebody has to go.
    """

    watermark: float = 0.01

    def reserve_tokens(self, sequence: Sequence) -> int:
        return sequence.planned_length + 1

    def headroom_pages(
        self, sequence: Sequence, running: Seq[Sequence], config: EngineConfig
    ) -> int:
        return int(self.watermark * (config.num_pages - 1)) if running else 0

    @property
    def extends(self) -> bool:
        return True
