"""What pages are used for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxserve.memory.disk_tier import NO_DISK, DiskTier, DiskUsage
from jaxserve.memory.host_pool import HostPool
from jaxserve.memory.page_pool import PagePool


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PageUsage:
    """Counts of the pages of the device, of the host and of the disk.

    Attributes:
      num_usable: pages of the device that sequences can own: all except the null page.
      num_owned: pages that sequences own.
      num_reserved: pages that are reserved beside those, and not allocated yet.
      num_cached: pages that no sequence owns, with contents that may be wanted again.
      num_available: pages that can be reserved: free and cached ones that are not reserved yet.
      num_host, num_host_free: pages of the host, and those of them that hold nothing.
    """

    num_usable: int
    num_owned: int
    num_reserved: int
    num_cached: int
    num_available: int
    num_host: int
    num_host_free: int
    disk: DiskUsage

    @classmethod
    def of(cls, pool: PagePool, host: HostPool, disk: DiskTier | None) -> PageUsage:
        """Return what the pages of the three tiers are used for now."""
        return cls(
            num_usable=pool.num_usable,
            num_owned=pool.num_owned,
            num_reserved=pool.num_reserved,
            num_cached=pool.num_cached,
            num_available=pool.num_available,
            num_host=host.num_pages,
            num_host_free=host.num_free,
            disk=NO_DISK if disk is None else disk.usage,
        )
