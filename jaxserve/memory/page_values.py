"""What a cached page is worth to a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from jaxserve.memory.cached_page import CachedPage
from jaxserve.memory.eviction import Eviction, RecomputeCost
from jaxserve.memory.reuse import ReuseRate

# Pages that are looked at before one step while most are declined.
_FEW = 4


@final
class PageValues:
    """Values pages by what computing them costs, and by when they were used.

    Args:
      eviction: gives the value; pages of the lowest are evicted first.
      cost: of computing a page after a context.
      copy_s: seconds to copy a page to the host, and again to copy it back.
      now: the clock.
      learns_reuse: copy a page only if what that saves, as often as pages have come back lately,
        is worth the copy. Otherwise pages are taken to come back.

    Attributes:
      reuse: how often pages come back.
    """

    def __init__(
        self,
        page_size: int,
        eviction: Eviction,
        cost: RecomputeCost,
        now: Callable[[], float],
        copy_s: float,
        *,
        learns_reuse: bool = False,
    ):
        self.reuse = ReuseRate()
        self._learns_reuse = learns_reuse
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
        """Whether copying a page there and back is expected to cost no more than computing it."""
        saved_s = self._cost_s(page) - self._copy_s
        if not self._learns_reuse or any(branch.returns for branch in page.branches):
            return self._copy_s <= saved_s
        if page.count_once():
            self.reuse.gone()
        return self._copy_s <= self.reuse.chance * saved_s

    def most_to_look_at(self, num_pages: int) -> int:
        """Return how many of these pages to ask `is_worth_copying` for before one step.

        Few, while most of them would be declined, so that a step does not pay for that.
        """
        saved_s = self._cost(self._page_size) - self._copy_s
        pays = not self._learns_reuse or self._copy_s <= self.reuse.chance * saved_s
        return num_pages if pays else min(num_pages, _FEW)

    def _cost_s(self, page: CachedPage) -> float:
        cost_s = self._costs_s.get(page.index)
        if cost_s is None:
            cost_s = self._costs_s[page.index] = self._cost((page.index + 1) * self._page_size)
        return cost_s
