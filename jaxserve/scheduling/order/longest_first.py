"""Decreasing first fit: the largest reservation first, then each that fits beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from jaxserve.scheduling.lengths.tracker import LengthTracker
from jaxserve.scheduling.policy import Admission
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class LongestFirst:
    """S3's packing of one bin (section 3.2; Johnson 1973): by reservation, the largest first.

    A sequence that does not fit is passed by those that do. The paper does not treat starvation;
    here a reserved token is a head start of `ageing_s` seconds, so that a sequence that arrives
    long after another comes behind it whatever its length, and a sequence that was passed
    `max_passes` times is passed no more.

    Attributes:
      by: computes the reservation.
    """

    heeds_bounds: ClassVar[bool] = False
    heeds_priority: ClassVar[bool] = False

    by: Admission
    ageing_s: float = 1.0
    max_passes: int = 256

    def key(self, sequence: Sequence, lengths: LengthTracker) -> tuple[float, float, int]:
        arrival_s = sequence.request.arrival_s
        reserved = min(self.by.reserve_tokens(sequence, lengths), sequence.max_length)
        return arrival_s - self.ageing_s * reserved, arrival_s, sequence.key
