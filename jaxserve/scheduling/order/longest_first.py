"""Decreasing first fit: the largest reservation first, and others that fit beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxserve.scheduling.policy import Admission
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class LongestFirst:
    """S3's packing of one bin (section 3.2; Johnson 1973): by reservation, the largest first.

    A sequence that does not fit is passed by others that do. The paper says nothing of starvation.
    Here a reserved token is a head start of `ageing_s`, so that arrivals long after a sequence come
    behind it whatever their length; and one that was passed `max_passes` times is passed no more.

    Attributes:
      by: what is reserved. It may not depend on tokens that come while the sequence runs.
    """

    by: Admission
    ageing_s: float = 1.0
    max_passes: int = 256

    def key(self, sequence: Sequence) -> tuple[float, float, int]:
        arrival_s = sequence.request.arrival_s
        return (
            arrival_s - self.ageing_s * self.by.reserve_tokens(sequence),
            arrival_s,
            sequence.key,
        )
