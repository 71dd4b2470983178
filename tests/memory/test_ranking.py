"""Pages go by value, the lowest first, and no call but the first looks at all of a large pool."""

from __future__ import annotations

import random

from jaxserve.memory.cached_page import Branch, CachedPage
from jaxserve.memory.ranking import Ranking


class _Pool:
    """Pages whose value is their index, in a random order, and how many were ranked."""

    def __init__(self, num_pages: int):
        indices = random.Random(0).sample(range(num_pages), num_pages)
        self.pages = {place: CachedPage(index) for place, index in enumerate(indices)}
        self.gone: set[CachedPage] = set()
        self.num_ranked = 0
        self.ranking = Ranking(self.pages, self.may_go, self.rank)

    def may_go(self, page: CachedPage) -> bool:
        return page not in self.gone

    def rank(self, page: CachedPage) -> tuple[float, int]:
        self.num_ranked += 1
        return float(page.index), page.index

    def take(self) -> int | None:
        """Return the index of the lowest page, which is gone then."""
        page = self.ranking.lowest()
        if page is None:
            return None
        self.gone.add(page)
        return page.index


def test_all_go_in_order_and_few_are_ranked_at_a_time():
    """The first call ranks 2,000 pages; each of those after it ranks 32 at most."""
    pool = _Pool(2_000)
    assert pool.take() == 0 and pool.num_ranked == 2_000
    for index in range(1, 2_000):
        pool.num_ranked = 0
        assert pool.take() == index
        assert pool.num_ranked <= 32, index
    assert pool.take() is None


def test_what_was_used_meanwhile_is_passed_over():
    """Until the next sort, in which it has its place again; for a small pool that is soon."""
    pool = _Pool(10)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    used = next(page for page in pool.pages.values() if page.index == 3)
    used.join(Branch(0.0))
    assert [pool.take() for _ in range(7)] == [4, 5, 6, 7, 8, 9, 3]


def test_what_was_ranked_ahead_of_time_may_be_gone():
    """Other pages are found; None is returned where none is left."""
    pool = _Pool(400)
    for _ in range(120):  # the next sort has begun
        pool.take()
    kept = [page for page in pool.pages.values() if page.index > 397]
    pool.gone = set(pool.pages.values()) - set(kept)
    for page in kept:
        page.join(Branch(0.0))
    assert {pool.take(), pool.take()} == {398, 399}
    assert pool.take() is None
