"""Keep no pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from jaxserve.memory.eviction import LRU, Eviction


@final
@dataclass(frozen=True)
class Stateless:
    """Pages are free as soon as the sequence ends."""

    keeps_pages: ClassVar[bool] = False
    uses_host: ClassVar[bool] = False

    @property
    def learns_reuse(self) -> bool:
        return False

    @property
    def free_share(self) -> float:
        return 0.0

    @property
    def eviction(self) -> Eviction:
        return LRU()
