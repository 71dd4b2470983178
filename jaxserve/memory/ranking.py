"""Cached pages in the order in which they are evicted."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from typing import final

from jaxserve.memory.cached_page import CachedPage

# Pages that a call ranks ahead of time, at least, while the lowest of the last sort run out.
_RANKED_AT_ONCE = 8


@final
class Ranking:
    """Pages by value, the lowest first; sorted again when the lowest of the last sort are used up.

    The value of what is left changes meanwhile, by time alone: what was used since is passed over.
    The next sort is prepared by the last calls before it, some pages each, so that no call ranks
    all pages of a large pool.

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
        # Of the next sort, if it has begun: pages that are not ranked yet, and those that are:
        # (rank, number, page, its uses).
        self._has_begun = False
        self._unranked: deque[CachedPage] = deque()
        self._ranked: list[tuple[tuple[float, int], int, CachedPage, int]] = []

    def lowest(self) -> CachedPage | None:
        """Return the page of the lowest value that may go, or None; it is not ranked any more."""
        page = self._next()
        while page is None:
            is_last = not self._has_begun  # else what was ranked ahead of time may be gone
            self._sort()
            page = self._next()
            if is_last:
                return page
        if 0 < _RANKED_AT_ONCE * len(self._lowest) <= len(self._pages):
            self._begin()
            share = -(-len(self._unranked) // len(self._lowest))
            self._rank_next(max(_RANKED_AT_ONCE, share))
        return page

    def put_back(self, page: CachedPage) -> None:
        """Rank it again; it stays the lowest."""
        self._lowest.appendleft((page, page.num_uses))

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._unranked.extend(self._pages.values())

    def _rank_next(self, count: int) -> None:
        for _ in range(min(count, len(self._unranked))):
            page = self._unranked.popleft()
            if self._may_go(page):
                self._ranked.append((self._rank(page), len(self._ranked), page, page.num_uses))

    def _sort(self) -> None:
        self._begin()
        self._rank_next(len(self._unranked))
        few = heapq.nsmallest(32 + len(self._ranked) // 4, self._ranked)
        self._lowest.extend((page, num_uses) for _, _, page, num_uses in few)
        self._ranked.clear()
        self._has_begun = False

    def _next(self) -> CachedPage | None:
        while self._lowest:
            page, num_uses = self._lowest.popleft()
            if page.num_uses == num_uses and self._may_go(page):
                return page
        return None
