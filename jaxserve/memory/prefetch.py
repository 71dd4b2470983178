"""Chunks that waiting sequences will begin with, brought from the host before their turn."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

from jaxserve.memory.chunks import Chunk
from jaxserve.memory.page_cache import PageCache
from jaxserve.memory.ranking import Ranking

# Chunks that come with one plan, those of admitted sequences included: as many as one call copies.
_MAX_COMING = 8


@final
class Prefetch:
    """Puts chunks into pages that nobody owns, where they are cached as others are.

    They keep their host pages, so that giving them up again loses nothing, and all sequences have
    as many pages available as without them.

    Attributes:
      num_pages: brought so far.
    """

    def __init__(self, cache: PageCache):
        self.num_pages = 0
        self._cache = cache
        self._awaited: Collection[Chunk] = ()
        self._lowest = Ranking(cache.on_device, self._may_give_way, cache.order)

    def bring(self, awaited: Sequence[Chunk]) -> list[Chunk]:
        """Have the next plan bring some of these from the host; to be called last before it.

        Each comes to a free page, or to one whose contents are worth less and lie on the host too.

        Args:
          awaited: by all waiting sequences, the first one's first. None gives way to another.

        Returns:
          Those that come.
        """
        self._awaited = set(awaited)
        coming: list[Chunk] = []
        for chunk in awaited:
            if chunk.page is not None or chunk.host_page is None:
                continue
            is_late = self._cache.num_coming >= _MAX_COMING or self._cache.is_leaving(chunk)
            if is_late or not self._make_room(chunk):
                break
            pool = self._cache.pool
            pool.promise(1)
            pages = pool.draw(1)
            self._cache.restore(chunk, *pages)
            pool.release(pages)
            coming.append(chunk)
        self.num_pages += len(coming)
        return coming

    def _make_room(self, chunk: Chunk) -> bool:
        """Have a page free that is promised to nobody."""
        pool = self._cache.pool
        if pool.num_available < 1:
            return False
        if pool.num_free:
            return True
        num_spared = sum(
            c.host_page is not None and self._cache.is_cached(c) for c in self._awaited
        )
        if pool.num_copied == num_spared:
            return False
        victim = self._lowest.lowest()
        if victim is None:
            return False
        if self._cache.order(victim) >= self._cache.order(chunk):
            self._lowest.put_back(victim)
            return False
        self._cache.leave_device(victim)
        return True

    def _may_give_way(self, chunk: Chunk) -> bool:
        """It is cached, awaited by nobody, and a plan before the next copied it to the host."""
        if chunk.host_page is None or self._cache.is_leaving(chunk) or chunk in self._awaited:
            return False
        return self._cache.is_cached(chunk)
