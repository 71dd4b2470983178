"""The order in which cached pages are evicted, and the tier that holds them."""

from __future__ import annotations

import random

import pytest

from jaxserve.memory.cached_page import Branch, CachedPage, PageKeys
from jaxserve.memory.eviction import LRU, CostOverTime, PageValues, RecomputeCost
from jaxserve.memory.page_cache import PageCache
from jaxserve.memory.page_pool import HostPool
from tests.common.tiers import seeds
from tests.memory.made_up import COST, Clock, allocated, cached

pytestmark = pytest.mark.fast


def _cache(
    num_pages=11, num_host_pages=0, eviction=None, host=None, copy_s=0.0
) -> tuple[PageCache, PageValues, Clock]:
    clock = Clock()
    values = PageValues(4, eviction or CostOverTime(), COST, clock, copy_s)
    return PageCache(num_pages, host or HostPool(num_host_pages), values), values, clock


def _lie(pages) -> str:
    """Return the tier of each page: device, host, both or none."""
    letters = {(True, False): "d", (False, True): "h", (True, True): "b", (False, False): "-"}
    return "".join(letters[c.device_page is not None, c.host_page is not None] for c in pages)


def test_leading_pages_go_first():
    """A leading page attends to fewer tokens, so it costs less to compute."""
    cache, _, clock = _cache()
    pages = cached(cache, clock, "a", 10)
    clock.now_s = 1.0
    allocated(cache, 4)
    assert _lie(pages) == "----dddddd" and cache.num_evicted == 4
    assert cache.find([b"a 0", b"a 4", b"b 0"]) == [pages[4]]
    assert cache.were_evicted([b"a 0", b"a 4", b"b 0"]) == [True, False, False]


@pytest.mark.parametrize("eviction, expected", [(CostOverTime(), "both"), (LRU(), "older")])
def test_cost_over_time_weighs_what_lru_does_not(eviction, expected):
    """A late page of an old conversation is worth more than the first page of a newer one."""
    cache, _, clock = _cache(num_pages=301, eviction=eviction)
    older = cached(cache, clock, "older", 200)
    clock.now_s = 1.0
    newer = cached(cache, clock, "newer", 100)
    clock.now_s = 3.0
    allocated(cache, 100)
    assert ("d" not in _lie(newer)) is False and "-" in _lie(older)
    assert ("-" in _lie(newer)) == (expected == "both")


def test_lru_evicts_the_least_recently_used_page_whenever_it_was_ranked():
    """Conversations are ranked again in turns, between evictions that are seconds apart."""
    rng = random.Random(0)
    cache, _, clock = _cache(num_pages=81, eviction=LRU())
    left: list[tuple[float, int, CachedPage]] = []
    for name in range(20):
        clock.now_s += rng.random()
        left += [(clock(), page.index, page) for page in cached(cache, clock, str(name), 4)]
    while left:
        clock.now_s += rng.expovariate(0.1)
        allocated(cache, 1)
        (gone,) = [each for each in left if each[2].device_page is None]
        assert gone == min(left, key=lambda each: each[:2]), f"{len(left)} left"
        left.remove(gone)


def test_a_page_counts_for_every_conversation_that_shares_it():
    """The values are summed; a conversation whose last page is evicted does not count."""
    cache, values, clock = _cache()
    (shared,) = cached(cache, clock, "a", 1)
    (alone,) = cached(cache, clock, "b", 1)
    clock.now_s = 2.0
    assert values.value(shared) == values.value(alone)
    other = Branch(1.0, tip=alone)
    shared.join(other)
    assert values.value(shared) == pytest.approx(3 * values.value(alone))
    cache.evict(alone)
    assert values.value(shared) == pytest.approx(COST(4) / 2)


def test_pages_go_to_the_host_by_value_and_from_there_nowhere():
    """The host holds the most valuable pages of those that left the device."""
    cache, _, clock = _cache(num_host_pages=3)
    pages = cached(cache, clock, "a", 10)
    clock.now_s = 1.0
    allocated(cache, 2)
    assert _lie(pages) == "hhdddddddd"
    assert cache.copies_out(free_share=0.0) == ((_device_page(10), 0), (_device_page(9), 1))
    allocated(cache, 3)
    assert _lie(pages) == "--hhhddddd"


def _device_page(page: int) -> int:
    """Return the device page of the first conversation's i-th page from the end."""
    return 11 - page


def test_what_costs_less_to_compute_than_to_copy_is_dropped():
    """The copies to the host and back both count."""
    cache, _, clock = _cache(num_host_pages=10, copy_s=57.0)  # COST(4) is 104, COST(16) is 116
    pages = cached(cache, clock, "a", 10)
    allocated(cache, 5)
    assert _lie(pages) == "---hhddddd"


def test_nothing_is_copied_ahead_while_something_comes_back():
    """Copies from the host have priority over copies to it."""
    cache, _, clock = _cache(num_host_pages=10)
    first, *_ = cached(cache, clock, "a", 10)
    clock.now_s = 1.0
    (owned,) = allocated(cache, 1)
    cache.copies_out(free_share=0.0)
    cache.restore(first, owned)
    assert cache.copies_out(free_share=1.0) == ()
    assert cache.incoming.take(None) == ((0, owned),)
    assert len(cache.copies_out(free_share=0.5)) == 5


def test_a_page_without_a_name_is_dropped_where_its_contents_are_known():
    """One of two cached pages with equal contents is dropped."""
    cache, _, clock = _cache()
    branch = Branch(clock())
    pages = allocated(cache, 3)
    known = cache.add(pages[0], 0, b"x", branch)
    late, other = cache.add(pages[1], 0, None, branch), cache.add(pages[2], 0, None, branch)
    cache.pool.free(pages)
    cache.set_key(late, b"x")
    cache.set_key(other, b"y")
    assert _lie([known, late, other]) == "d-d" and cache.find([b"y"]) == [other]
    cache.check_integrity()


def test_keys_say_everything_up_to_the_end_of_their_page():
    """They are equal if prompts are equal from the first token on, and so are the weights."""
    keys = PageKeys().of((1, 2, 3, 4, 5), 2, b"w")
    assert len(keys) == 2
    assert PageKeys().of((1, 2, 3, 9), 2, b"w")[0] == keys[0]
    assert PageKeys().of((1, 2, 3, 9), 2, b"w")[1] != keys[1]
    assert PageKeys().of((0, 2, 3, 4), 2, b"w")[1] != keys[1]
    assert PageKeys().of((1, 2, 3, 4), 2, b"v")[0] != keys[0]
    growing = PageKeys()
    growing.of((1, 2, 3), 2, b"w")
    assert growing.of((1, 2, 3, 4, 5), 2, b"w") == keys
    assert growing.of((1, 2, 3, 4), 2, b"v") != keys


def test_keys_depend_on_the_adapter():
    """No key of one adapter is one of another, or one without; `anew` keeps the adapter."""
    keys = {
        adapter: PageKeys((), adapter).of((1, 2, 3, 4), 2, b"w") for adapter in (b"", b"a", b"b")
    }
    assert len({key for own in keys.values() for key in own}) == 6
    assert PageKeys((), b"a").anew().of((1, 2, 3, 4), 2, b"w") == keys[b"a"]
    assert PageKeys((), b"a").of((1, 2, 3, 4), 2, b"v")[0] != keys[b"a"][0]
    assert PageKeys((7,), b"a").of((1, 2), 2, b"w") != PageKeys((7,)).of((1, 2), 2, b"w")


def test_costs_are_interpolated_between_powers_of_two():
    """Beyond the last power of two they are extrapolated."""
    cost = RecomputeCost.profiled(lambda context: float(context**2), 8)
    assert cost.points == ((1, 1.0), (2, 4.0), (4, 16.0), (8, 64.0))
    assert cost(3) == 10.0 and cost(8) == 64.0 and cost(10) == 88.0


@seeds(150)
def test_counts_stay_right_under_random_use(seeds):
    """The counts stay right under random adds, hits, shares, restores, allocations and clears."""
    for seed in seeds:
        rng = random.Random(seed)
        num_pages, host = rng.randint(3, 20), HostPool(rng.choice([0, 2, 30]))
        cache, _, clock = _cache(num_pages, host=host)
        owned: list[list[int]] = []
        for number in range(60):
            clock.now_s += rng.random()
            action = rng.randrange(6)
            if action == 0 and cache.pool.num_available:
                cached(cache, clock, str(number // 8), rng.randint(1, cache.pool.num_available))
            elif action == 1 and cache.pool.num_available:
                owned.append(allocated(cache, rng.randint(1, cache.pool.num_available)))
            elif action == 2 and owned:
                cache.pool.free(owned.pop())
            elif action == 3:
                keys = [f"{rng.randint(0, number // 8)} {i}".encode() for i in range(9)]
                for page in cache.find(keys):
                    if page.device_page is not None and cache.pool.num_available:
                        cache.pool.lock([page.device_page])
                        owned.append([page.device_page])
                    elif page.device_page is None and cache.pool.num_available:
                        owned.append(allocated(cache, 1))
                        if page.host_page is not None:
                            cache.restore(page, owned[-1][0])
            elif action == 4:
                taken = {host_page for _, host_page in cache.copies_out(free_share=rng.random())}
                assert len(taken) <= cache.max_host_pages
                cache.incoming.take(None)
            elif rng.random() < 0.1:
                cache.drop_uncopied()
                cache.clear(b"new")
            cache.check_integrity()
        for pages in owned:
            cache.pool.free(pages)
        cache.clear(b"")
        assert cache.pool.num_free == cache.pool.num_usable, seed
        assert host.num_free == host.num_pages, seed
