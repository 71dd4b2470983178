"""Cached pages that no sequence owns, and a clock that a test sets."""

from __future__ import annotations

from jaxserve.memory.cached_page import Branch, CachedPage
from jaxserve.memory.eviction import RecomputeCost
from jaxserve.memory.page_cache import PageCache

COST = RecomputeCost.analytic(attention=1.0, other=100.0, longest=1024)


class Clock:
    """A clock that a test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def allocated(cache: PageCache, num: int) -> list[int]:
    assert cache.pool.reserve(num)
    pages = cache.pool.allocate(num)
    cache.check_integrity()
    return pages


def cached(cache: PageCache, clock: Clock, name: str, num: int) -> list[CachedPage]:
    """Return `num` cached pages of one conversation that is active now; no sequence owns them."""
    branch = Branch(clock())
    owned, pages = allocated(cache, num), []
    for index, page in enumerate(owned):
        pages.append(cache.add(page, index, f"{name} {index}".encode(), branch))
        branch.grow_to(pages[-1])
    cache.pool.free(owned)
    cache.check_integrity()
    return pages
