"""Pages go to the host only as long as they come back often enough."""

from __future__ import annotations

import pytest

from jaxserve.memory.cached_page import Branch, CachedPage
from jaxserve.memory.eviction import CostOverTime, PageValues, RecomputeCost, ReuseRate

pytestmark = pytest.mark.fast

# Computing a page costs ten of its copies.
COST = RecomputeCost(((1, 10.0), (2, 10.0)))


def _values() -> PageValues:
    return PageValues(4, CostOverTime(), COST, lambda: 0.0, 1.0, learns_reuse=True)


def _pages(count: int, *, returns: bool = False) -> list[CachedPage]:
    pages = [CachedPage(0) for _ in range(count)]
    for page in pages:
        page.join(Branch(0.0, returns=returns))
    return pages


def test_what_never_comes_back_is_copied_no_more_until_it_does():
    """Some hundred pages that stay away end the copies; pages that come back resume them."""
    values = _values()
    copied = [values.is_worth_copying(page) for page in _pages(300)]
    assert copied[0] and not copied[-1]
    values.reuse.back(100)
    assert values.is_worth_copying(*_pages(1))


def test_what_is_sure_to_come_back_is_copied_and_not_counted():
    """Pages of preempted sequences and of conversations say nothing about the others."""
    values = _values()
    before = values.reuse.chance
    assert all(values.is_worth_copying(page) for page in _pages(300, returns=True))
    assert values.reuse.chance == before


def test_a_page_counts_once_until_it_is_used():
    """It may be looked at before every step."""
    values, (page,) = _values(), _pages(1)
    values.is_worth_copying(page)
    once = values.reuse.chance
    values.is_worth_copying(page)
    assert values.reuse.chance == once
    page.join(Branch(0.0))
    values.is_worth_copying(page)
    assert values.reuse.chance < once


def test_old_pages_count_less():
    """After a long time without returns, some hundred of them are enough for a high chance."""
    rate = ReuseRate()
    for _ in range(100_000):
        rate.gone()
    assert rate.chance < 0.001
    rate.back(1000)
    assert rate.chance == pytest.approx(0.35, abs=0.15)
