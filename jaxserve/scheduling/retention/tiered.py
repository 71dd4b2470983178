"""Keep pages on the device, and what is evicted from there on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from jaxserve.memory.eviction import CostOverTime, Eviction


@final
@dataclass(frozen=True)
class Tiered:
    """As Pensieve (section 3.4.3 of the thesis). Without host memory it is `DeviceOnly`.

    Pages of preempted sequences go the same way: they are of high value, because their sequences
    were active just now, and are found again at the next admission.

    Attributes:
      free_share: of the device's pages; when less can be taken without loss, pages of low value
        are copied to the host ahead of time.
      learns_reuse: copy pages only as long as they come back often enough for that to pay. Those of
        preempted sequences and of conversations are copied in any case.
    """

    eviction: Eviction = CostOverTime()
    free_share: float = 0.25
    learns_reuse: bool = False
    keeps_pages: ClassVar[bool] = True
    uses_host: ClassVar[bool] = True
