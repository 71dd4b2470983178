"""Prefetched pages of waiting sequences, and the cached pages that they replace."""

from __future__ import annotations

import random

import pytest

from jaxserve.memory.cached_page import CachedPage
from jaxserve.memory.eviction import CostOverTime, PageValues
from jaxserve.memory.page_cache import PageCache
from jaxserve.memory.page_pool import NULL_PAGE, HostPool
from jaxserve.memory.prefetch import Prefetch
from tests.common.tiers import seeds
from tests.memory.made_up import COST, Clock, cached

pytestmark = pytest.mark.fast


def _cache(num_pages: int = 11, num_host_pages: int = 100) -> tuple[PageCache, Prefetch, Clock]:
    clock = Clock()
    values = PageValues(4, CostOverTime(), COST, clock, 0.0)
    cache = PageCache(num_pages, HostPool(num_host_pages), values)
    return cache, Prefetch(cache, values), clock


def _plan(cache: PageCache, free_share: float = 0.0) -> tuple[tuple, tuple]:
    copies = cache.copies_out(free_share=free_share), cache.incoming.take(None)
    cache.check_integrity()
    return copies


def _go_on(pages: list[CachedPage], now_s: float) -> None:
    """Make the pages' conversation active again."""
    for page in pages:
        page.branches[-1].begin([page], now_s)


def _on_host(cache: PageCache, clock: Clock, num: int = 10) -> list[CachedPage]:
    """Return pages on the host only; another conversation has the device's pages, with copies."""
    pages = cached(cache, clock, "awaited", num)
    clock.now_s += 1.0
    cached(cache, clock, "other", 10)
    _plan(cache)
    clock.now_s += 1.0
    _plan(cache, free_share=1.0)
    assert all(page.device_page is None for page in pages)
    return pages


def test_what_is_worth_less_and_lies_on_the_host_too_gives_way():
    """Each plan prefetches a few pages, the first ones first; afterwards they are cached copies."""
    cache, prefetch, clock = _cache()
    pages = _on_host(cache, clock)
    available = cache.pool.num_available
    _go_on(pages, clock.now_s)
    assert prefetch.bring(pages) == pages[:8] and prefetch.num_pages == 8
    out, back = _plan(cache, free_share=1.0)
    assert out == () and [host for host, _ in back] == [c.host_page for c in pages[:8]]
    assert prefetch.bring(pages) == pages[8:]
    _plan(cache)
    assert prefetch.bring(pages) == []
    assert all(cache.is_cached(c) and c.host_page is not None for c in pages)
    assert cache.pool.num_available == available and cache.pool.num_copied == 10


def test_pages_of_an_inactive_conversation_replace_no_later_ones():
    """Only pages of lower value are replaced; if all are worth more, none is."""
    cache, prefetch, clock = _cache()
    pages = _on_host(cache, clock)
    assert prefetch.bring(pages) == []


def test_what_has_no_copy_does_not_give_way():
    """Otherwise a prefetch would cause a copy to the host, which has lower priority on the link."""
    cache, prefetch, clock = _cache(num_host_pages=12)
    pages = cached(cache, clock, "awaited", 10)
    clock.now_s += 1.0
    cached(cache, clock, "other", 10)
    _plan(cache)
    _go_on(pages, clock.now_s)
    assert cache.pool.num_copied == 0 and prefetch.bring(pages) == []


def test_what_leaves_with_the_next_plan_neither_gives_way_nor_comes_back():
    """Its copy has not been made yet."""
    cache, prefetch, clock = _cache()
    pages = cached(cache, clock, "awaited", 10)
    clock.now_s += 1.0
    (last,) = cached(cache, clock, "other", 1)
    gone = [page for page in pages if page.device_page is None]
    assert gone == pages[:1] and cache.is_outgoing(gone[0])
    cache.evict(last)
    _go_on(pages, clock.now_s)
    assert cache.pool.num_free == 1 and prefetch.bring(pages) == []
    _plan(cache)
    assert prefetch.bring(pages) == gone


def test_waiting_sequences_do_not_take_pages_from_each_other():
    """They do not take pages from sequences with reservations either."""
    cache, prefetch, clock = _cache()
    pages = _on_host(cache, clock)
    others = list(cache.on_device.values())
    _go_on(pages, clock.now_s)
    assert prefetch.bring([*others, *pages]) == []
    assert cache.pool.reserve(10)
    assert prefetch.bring(pages) == []
    cache.pool.unreserve(3)
    assert len(prefetch.bring(pages)) == 8
    assert cache.pool.num_available == 3


@seeds(1_000, 150)
def test_counts_stay_right_under_random_use(seeds):
    """The counts stay right under random adds, frees, evictions, restores and waits."""
    num_brought = 0
    for seed in seeds:
        rng = random.Random(seed)
        cache, prefetch, clock = _cache(rng.randint(3, 20), rng.choice([3, 30]))
        rank = PageValues(4, CostOverTime(), COST, clock, 0.0).rank
        owned: list[list[int]] = []
        known: list[CachedPage] = []
        for number in range(30):
            clock.now_s += rng.random()
            action, room = rng.randrange(5), cache.pool.num_available
            if action <= 1 and room:
                known += cached(cache, clock, str(number), rng.randint(1, room))
            elif action == 2 and room:
                count = rng.randint(1, room)
                assert cache.pool.reserve(count)
                owned.append(cache.pool.allocate(count))
            elif action == 3 and owned:
                cache.pool.free(owned.pop())
            elif action == 4 and known:
                cache.evict(rng.choice(known))
            awaited = [c for c in known if c.is_resident]
            awaited = rng.sample(awaited, min(len(awaited), rng.randint(0, 12)))
            if rng.random() < 0.5:
                _go_on(awaited, clock.now_s)
            before = {c: rank(c) for c in cache.on_device.values()}
            lossless = {c for c in before if cache.is_cached(c) and c.host_page is not None}
            counts = cache.pool.num_available, cache.pool.num_copied + cache.pool.num_free
            leaving = {c.host_page for c in known if cache.is_outgoing(c)}
            brought = prefetch.bring(awaited)
            num_brought += len(brought)
            assert counts == (
                cache.pool.num_available,
                cache.pool.num_copied + cache.pool.num_free,
            ), seed
            for gone in (c for c in before if c.device_page is None):
                assert gone in lossless and gone not in awaited, seed
                assert before[gone] < max(map(rank, brought)), seed
            cache.check_integrity()
            if rng.random() < 0.8:
                out, back = _plan(cache, rng.random())
                assert len({page for _, page in back} - {NULL_PAGE}) == len(back) <= 8, seed
                assert not back or {host_page for _, host_page in out} == leaving, seed
        for pages in owned:
            cache.pool.free(pages)
    assert num_brought > 3 * len(seeds), num_brought
