"""Pages go by value, the lowest first, and no call but the first looks at all of a large pool."""

from __future__ import annotations

import random

import pytest

from jaxserve.memory.cached_page import Branch, CachedPage
from jaxserve.memory.eviction import Ranking

pytestmark = pytest.mark.fast


class _Pool:
    """Pages whose value is their index, of conversations, and how many were ranked.

    Conversation i of n has the pages i, i + n and so on; the conversations are in a random order.
    """

    def __init__(self, num_pages: int, num_branches: int):
        self.branches: dict[Branch, None] = {}
        self.pages: list[CachedPage] = []
        for first in random.Random(0).sample(range(num_branches), num_branches):
            branch = Branch(0.0)
            self.branches[branch] = None
            for index in range(first, num_pages, num_branches):
                page = CachedPage(index, device_page=1 + index)
                page.join(branch)
                self.pages.append(page)
        self.num_looks = self.num_ranked = 0
        self.ranking = Ranking(self.branches, "on_device", self.may_go, self.rank)

    def may_go(self, page: CachedPage) -> bool:
        self.num_looks += 1
        return page.device_page is not None

    def rank(self, page: CachedPage) -> tuple[float, int]:
        self.num_ranked += 1
        return float(page.index), page.index

    def take(self) -> int | None:
        """Return the index of the lowest page, which is gone then."""
        page = self.ranking.lowest()
        if page is None:
            return None
        page.leave_device()
        return page.index


@pytest.mark.parametrize("num_branches", [1, 40, 2_000])
def test_all_go_in_order_and_few_are_ranked_at_a_time(num_branches: int):
    """The first call ranks each conversation; each of the later calls ranks three pages at most."""
    pool = _Pool(2_000, num_branches)
    assert pool.take() == 0 and pool.num_ranked <= num_branches + 2
    for index in range(1, 2_000):
        pool.num_ranked = pool.num_looks = 0
        assert pool.take() == index
        assert pool.num_ranked <= 3 and pool.num_looks <= 6, index
    assert pool.take() is None


def test_pages_of_a_running_conversation_are_not_looked_at_while_others_may_go():
    """It has 1,000 pages that are owned; they are the last resort."""
    pool = _Pool(2_000, 2)
    running = next(iter(pool.branches))
    running.run()
    first = pool.pages[0].index
    taken = []
    for _ in range(1_000):
        pool.num_looks = 0
        taken.append(pool.take())
        assert pool.num_looks <= 4
    assert taken == list(range(1 - first, 2_000, 2))
    assert pool.take() == first


def test_a_conversation_that_comes_to_rest_is_found_at_once():
    """However many others run, whose pages may not go yet."""
    pool = _Pool(2_000, 2_000)
    for branch in pool.branches:
        branch.run()
    for page in pool.pages[:500]:
        (branch,) = page.branches
        branch.rest(1.0)
        pool.ranking.has_rested(branch)
        pool.num_looks = pool.num_ranked = 0
        assert pool.take() == page.index
        assert pool.num_looks <= 5 and pool.num_ranked <= 3


def test_what_several_conversations_share_has_a_place_of_its_own():
    """It need not be worth more than what is before it, nor less than what follows."""
    pool = _Pool(10, 1)
    for page in pool.pages[:3]:
        page.join(Branch(0.0))
    values = {0: 8.5, 1: 0.5, 2: 20.0}
    pool.ranking = Ranking(
        pool.branches,
        "on_device",
        pool.may_go,
        lambda page: (values.get(page.index, float(page.index)), page.index),
    )
    assert [pool.take() for _ in range(10)] == [1, 3, 4, 5, 6, 7, 8, 0, 9, 2]


def test_conversations_without_pages_are_forgotten():
    """All that have lost their pages are removed when the next order is made."""
    pool = _Pool(100, 20)
    assert [pool.take() for _ in range(100)] == list(range(100))
    assert pool.take() is None and not pool.branches


def test_what_was_used_meanwhile_is_passed_over():
    """Until the next order, in which it has its place again; for a small pool that is soon."""
    pool = _Pool(10, 10)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    used = next(page for page in pool.pages if page.index == 3)
    used.join(Branch(0.0))
    assert [pool.take() for _ in range(7)] == [4, 5, 6, 7, 8, 9, 3]


def test_a_conversation_that_was_used_meanwhile_is_passed_over():
    """None of its pages goes before it is ranked anew."""
    pool = _Pool(10, 2)
    assert pool.take() == 0
    used = next(page for page in pool.pages if page.index == 1).branches[0]
    used.rest(1.0)
    assert [pool.take() for _ in range(9)] == [2, 4, 1, 3, 5, 6, 7, 8, 9]


def test_what_was_ranked_ahead_of_time_may_be_gone():
    """Other pages are found; None is returned where none is left."""
    pool = _Pool(400, 400)
    for _ in range(120):  # the next order has begun
        pool.take()
    kept = [page for page in pool.pages if page.index > 397]
    for page in pool.pages:
        if page not in kept:
            page.leave_device()
    for page in kept:
        page.join(Branch(0.0))
    assert {pool.take(), pool.take()} == {398, 399}
    assert pool.take() is None
