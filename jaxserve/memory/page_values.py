"""What a cached page is worth to a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from jaxserve.memory.cached_page import CachedPage
from jaxserve.memory.eviction import Eviction, RecomputeCost


@final
class PageValues:
    """Values pages by what computing them costs, and by when they were used.

    Args:
      eviction: gives the value; pages of the lowest are evicted first.
      cost: of computing a page after a context.
      copy_s: seconds to copy a page to the host, and again to copy it back.
      now: the clock.
    """

    def __init__(
        self,
        page_size: int,
        eviction: Eviction,
        cost: RecomputeCost,
        now: Callable[[], float],
        copy_s: float,
    ):
        self._page_size = page_size
        self._eviction = eviction
        self._cost = cost
        self._now = now
        self._copy_s = copy_s
        # By the index of a page in its sequence.
        self._costs_s: dict[int, float] = {}

    def value_by(self, cost: RecomputeCost) -> None:
        """Have pages cost that much to compute, from here on."""
        self._cost = cost
        self._costs_s.clear()

    def copy_by(self, copy_s: float) -> None:
        """Have pages cost that much to copy, from here on."""
        self._copy_s = copy_s

    def value(self, page: CachedPage) -> float:
        """Return what a page is worth now."""
        branches = page.branches
        if len(branches) > 1:
            # The last of them where none counts any more.
            branches = [each for each in branches if each.counts] or branches[-1:]
        active = [branch.last_active_s for branch in branches]
        return self._eviction.value(self._cost_s(page), active, self._now())

    def rank(self, page: CachedPage) -> tuple[float, int]:
        """Return the sort key of eviction: by value, and of equal ones by position."""
        return self.value(page), page.index

    def is_worth_copying(self, page: CachedPage) -> bool:
        """Whether copying a page there and back costs no more than computing it."""
        return 2 * self._copy_s <= self._cost_s(page)

    def _cost_s(self, page: CachedPage) -> float:
        cost_s = self._costs_s.get(page.index)
        if cost_s is None:
            cost_s = self._costs_s[page.index] = self._cost((page.index + 1) * self._page_size)
        return cost_s
