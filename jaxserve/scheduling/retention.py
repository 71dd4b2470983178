"""What happens to a sequence's pages after its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from jaxserve.memory.eviction import LRU, CostOverTime, Eviction
from jaxserve.memory.snapshots import LearnedReuse, StateRetention


@final
@dataclass(frozen=True)
class Stateless:
    """Pages are free as soon as the sequence ends."""

    keeps_pages: ClassVar[bool] = False
    uses_host: ClassVar[bool] = False
    states = LearnedReuse()
    learns_reuse = False
    free_share = 0.0
    holding = None

    @property
    def eviction(self) -> Eviction:
        return LRU()


@final
@dataclass(frozen=True)
class DeviceOnly:
    """Pensieve without its host tier (thesis, section 3.6.1): evicted pages are dropped."""

    eviction: Eviction = CostOverTime()
    states: StateRetention = LearnedReuse()
    keeps_pages: ClassVar[bool] = True
    uses_host: ClassVar[bool] = False
    learns_reuse = False
    free_share = 0.0
    holding = None


@final
@dataclass(frozen=True)
class Tiered:
    """Keep pages on the device, and evicted ones on the host, as Pensieve (thesis, section 3.4.3).

    Without host memory it is `DeviceOnly`. Preempted sequences find their pages again: these have a
    high value, because their sequences were active just now.

    Attributes:
      free_share: of the device's pages; when less can be taken without loss, pages of low value are
        copied to the host ahead of time.
      learns_reuse: copy pages only while they come back often enough for that to pay. Those of
        preempted sequences and of conversations are copied in any case.
    """

    eviction: Eviction = CostOverTime()
    free_share: float = 0.25
    learns_reuse: bool = False
    states: StateRetention = LearnedReuse()
    keeps_pages: ClassVar[bool] = True
    uses_host: ClassVar[bool] = True
    holding = None
