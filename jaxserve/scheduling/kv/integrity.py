"""Whether pages, reservations and host pages add up (docs/architecture.md, invariants 1 and 2)."""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.memory.host_pool import HostPool
from jaxserve.memory.page_cache import PageCache
from jaxserve.scheduling.sequence import Phase, Sequence


def check_integrity(
    cache: PageCache, host: HostPool, page_size: int, sequences: Iterable[Sequence]
) -> None:
    """Raise AssertionError where sequences and pools disagree.

    Args:
      sequences: all that have not ended.
    """
    cache.check_integrity()
    pool = cache.pool
    owned: dict[int, int] = {}
    num_reserved = num_swapped = 0
    for sequence in sequences:
        kv = sequence.kv
        runs = sequence.phase is Phase.RUNNING
        assert (kv.table.reservation > 0) == runs, f"{sequence.phase} holds {kv.table.reservation}"
        assert not runs or kv.num_computed <= kv.table.num_pages * page_size, (
            "computed tokens lie outside the page table"
        )
        assert kv.num_cached <= kv.table.num_pages, "pages are cached that are not there"
        assert not kv.host_pages or sequence.phase is Phase.WAITING, "KV in two places"
        for page in kv.table.pages:
            owned[page] = owned.get(page, 0) + 1
        num_reserved += kv.table.reservation - kv.table.num_pages
        num_swapped += len(kv.host_pages)
    assert num_reserved == pool.num_reserved, "reservations do not add up"
    assert len(owned) == pool.num_owned, "owned pages do not add up"
    for page, count in owned.items():
        assert pool.refcount(page) == count, f"page {page}: wrong reference count"
    num_allocated = host.num_pages - host.num_free
    assert num_swapped + cache.num_host_pages == num_allocated, "host pages do not add up"
