"""Reserve exactly what the answer will need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class Oracle:
    """Knows forced lengths: the bound of what any prediction of lengths can reach.

    Answers without a forced length are reserved to their limit.
    """

    def reserve_tokens(self, sequence: Sequence) -> int:
        return sequence.request.end_length(sequence.max_length, sequence.sample_index)

    def headroom_pages(self, num_usable: int, num_running: int) -> int:
        return 0
