"""Reserve exactly what the answer will need."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import final

from jaxserve.core.config import EngineConfig
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class Oracle:
    """Knows forced lengths: the bound of what any prediction of lengths can reach.

    Answers without a forced length are reserved to their limit.
    """

    def reserve_tokens(self, sequence: Sequence) -> int:
        return sequence.request.end_length(sequence.max_length, sequence.sample_index)

    def headroom_pages(
        self, sequence: Sequence, running: Seq[Sequence], config: EngineConfig
    ) -> int:
        return 0

    @property
    def extends(self) -> bool:
        return True
