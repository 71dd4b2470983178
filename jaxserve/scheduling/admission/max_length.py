"""Reserve for the longest possible answer, as ORCA and FasterTransformer do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class MaxLength:
    """A sequence never outgrows its reservation, so nothing is ever preempted."""

    def reserve_tokens(self, sequence: Sequence) -> int:
        return sequence.max_length

    def headroom_pages(self, num_usable: int, num_running: int) -> int:
        return 0
