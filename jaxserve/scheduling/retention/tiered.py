"""Keep pages on the device, and what is evicted from there on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from jaxserve.memory.eviction import CostOverTime, Eviction


@final
@dataclass(frozen=True)
class Tiered:
    """As Pensieve (section 3.4.3 of the thesis). Without host memory it is `DeviceOnly`.

    Preempted sequences go the same way: their pages are of high value, for they were active just
    now, and found again when they are admitted.

    Attributes:
      free_share: of the device's pages; when less can be taken without loss, chunks of low value
        are copied to the host ahead of time.
    """

    eviction: Eviction = CostOverTime()
    free_share: float = 0.25
    keeps_pages: ClassVar[bool] = True
    uses_host: ClassVar[bool] = True
