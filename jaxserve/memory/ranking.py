"""Cached pages in the order in which they are evicted."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from typing import final

from jaxserve.memory.cached_page import CachedPage


@final
class Ranking:
    """Pages by value, the lowest first; sorted again when the lowest of the last sort are used up.

    The value of what is left changes meanwhile, by time alone: what was used since is passed over.

    Args:
      pages: by the page that holds them; the ones that `may_go` are ranked.
      rank: the sort key.
    """

    def __init__(
        self,
        pages: Mapping[int, CachedPage],
        may_go: Callable[[CachedPage], bool],
        rank: Callable[[CachedPage], tuple[float, int]],
    ):
        self._pages = pages
        self._may_go = may_go
        self._rank = rank
        self._lowest: deque[tuple[CachedPage, int]] = deque()

    def lowest(self) -> CachedPage | None:
        """Return the page of the lowest value that may go, or None; it is not ranked any more."""
        page = self._next()
        if page is None:
            pages = list(filter(self._may_go, self._pages.values()))
            few = heapq.nsmallest(32 + len(pages) // 4, pages, key=self._rank)
            self._lowest.extend((page, page.num_uses) for page in few)
            page = self._next()
        return page

    def put_back(self, page: CachedPage) -> None:
        """Rank it again; it stays the lowest."""
        self._lowest.appendleft((page, page.num_uses))

    def _next(self) -> CachedPage | None:
        while self._lowest:
            page, num_uses = self._lowest.popleft()
            if page.num_uses == num_uses and self._may_go(page):
                return page
        return None
