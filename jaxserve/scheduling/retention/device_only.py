"""Keep pages on the device until their place is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from jaxserve.memory.eviction import CostOverTime, Eviction


@final
@dataclass(frozen=True)
class DeviceOnly:
    """Pensieve without its host tier (section 3.6.1 of the thesis): what is evicted is dropped."""

    eviction: Eviction = CostOverTime()
    keeps_pages: ClassVar[bool] = True
    uses_host: ClassVar[bool] = False

    @property
    def learns_reuse(self) -> bool:
        return False

    @property
    def free_share(self) -> float:
        return 0.0
