"""Prefetching of pages from the host for waiting sequences."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import final

from jaxserve.memory.cached_page import Branch, CachedPage
from jaxserve.memory.eviction import PageValues, Ranking
from jaxserve.memory.page_cache import PageCache

# The most pages that come with one plan, those of admitted sequences included: one call copies
# them.
_MAX_INCOMING = 8
_NONE: Mapping[Branch, int] = MappingProxyType({})


@final
class Prefetch:
    """Copies pages from the host to device pages that no sequence owns, where they are cached.

    They keep their host pages, so evicting them again loses nothing, and sequences have as many
    pages available as without them. `num_pages` counts the pages brought so far.
    """

    def __init__(self, cache: PageCache, values: PageValues):
        self.num_pages = 0
        self._cache = cache
        self._values = values
        self._awaited: Collection[CachedPage] = ()
        self._long = _NONE
        # Awaited pages that are cached and copied; None until they are counted.
        self._num_spared: int | None = None
        self._lowest = Ranking(
            cache.branches,
            "on_host",
            self._may_give_way,
            values.rank,
            keeps=lambda branch: branch in self._long,
        )

    def bring(
        self, awaited: Sequence[CachedPage], long: Mapping[Branch, int] = _NONE
    ) -> list[CachedPage]:
        """Bring some of these pages from the host with the next plan; call it last before that.

        Each comes to a free page, or replaces one whose contents are worth less and are on the host
        too. Return the pages that come.

        Args:
          awaited: pages of all waiting sequences, in the order of the sequences; none is replaced.
          long: conversations of which `awaited` has only some pages, each with the number of its
            other pages that are cached and copied. None of their pages is replaced.
        """
        self._awaited, self._long, self._num_spared = set(awaited), long, None
        incoming: list[CachedPage] = []
        for page in awaited:
            if page.device_page is not None or page.host_page is None:
                continue
            is_late = len(self._cache.incoming) >= _MAX_INCOMING or self._cache.is_outgoing(page)
            if is_late or not self._make_room(page):
                break
            pool = self._cache.pool
            pool.reserve(1)
            allocated = pool.allocate(1)
            self._cache.restore(page, *allocated)
            pool.free(allocated)
            if self._num_spared is not None:
                self._num_spared += 1
            incoming.append(page)
        self.num_pages += len(incoming)
        return incoming

    def num_copied(self, pages: Iterable[CachedPage]) -> int:
        return sum(page.host_page is not None and self._cache.is_cached(page) for page in pages)

    def _make_room(self, page: CachedPage) -> bool:
        """Free a device page that is not reserved; False if none can be freed."""
        pool = self._cache.pool
        if pool.num_available < 1:
            return False
        if pool.num_free or self._cache.evict_passed():
            return True
        if self._num_spared is None:
            self._num_spared = self.num_copied(self._awaited) + sum(self._long.values())
        if pool.num_copied <= self._num_spared:
            return False
        victim = self._lowest.lowest()
        if victim is None:
            return False
        if self._values.rank(victim) >= self._values.rank(page):
            self._lowest.put_back(victim)
            return False
        self._cache.evict_from_device(victim)
        return True

    def _may_give_way(self, page: CachedPage) -> bool:
        """Whether it is cached, not awaited, and was copied to the host by an earlier plan."""
        if page.host_page is None or self._cache.is_outgoing(page) or page in self._awaited:
            return False
        if not self._cache.is_cached(page):
            return False
        return not self._long or not any(branch in self._long for branch in page.branches)
