"""Which chunk goes first, and where it lies meanwhile."""

from __future__ import annotations

import random

import pytest

from jaxserve.memory.chunks import Branch, PageKeys
from jaxserve.memory.eviction import LRU, CostOverTime, RecomputeCost
from jaxserve.memory.host_pool import HostPool
from jaxserve.memory.page_cache import PageCache

COST = RecomputeCost.analytic(attention=1.0, other=100.0, longest=1024)


class Clock:
    """Says what it is told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _cache(
    num_pages=11, num_host_pages=0, eviction=None, host=None, **options
) -> tuple[PageCache, Clock]:
    clock = Clock()
    eviction = eviction or CostOverTime()
    host = host or HostPool(num_host_pages)
    return PageCache(num_pages, host, 4, eviction, COST, clock, **options), clock


def _remember(cache: PageCache, name: str, num: int, branch: Branch | None = None) -> list:
    """`num` chunks of one conversation, owned by nobody."""
    branch = branch or Branch(cache._now())
    assert cache.pool.promise(num)
    pages = cache.pool.draw(num)
    chunks = []
    for index, page in enumerate(pages):
        chunks.append(cache.add(page, index, f"{name} {index}".encode(), branch))
        branch.tip = chunks[-1]
    cache.pool.release(pages)
    cache.check_integrity()
    return chunks


def _draw(cache: PageCache, num: int) -> list[int]:
    assert cache.pool.promise(num)
    pages = cache.pool.draw(num)
    cache.check_integrity()
    return pages


def _lie(chunks) -> str:
    """Where each is: device, host, both or nowhere."""
    letters = {(True, False): "d", (False, True): "h", (True, True): "b", (False, False): "-"}
    return "".join(letters[c.page is not None, c.host_page is not None] for c in chunks)


def test_leading_chunks_go_first():
    """They attend to less, so they cost less to compute."""
    cache, clock = _cache()
    chunks = _remember(cache, "a", 10)
    clock.now_s = 1.0
    _draw(cache, 4)
    assert _lie(chunks) == "----dddddd" and cache.num_dropped == 4
    assert cache.find([b"a 0", b"a 4", b"b 0"]) == [chunks[4]]
    assert cache.num_lost([b"a 0", b"a 4", b"b 0"]) == 1


@pytest.mark.parametrize("eviction, expected", [(CostOverTime(), "both"), (LRU(), "older")])
def test_cost_over_time_weighs_what_lru_does_not(eviction, expected):
    """A chunk far back in a conversation of a while ago outweighs the first of a later one."""
    cache, clock = _cache(num_pages=301, eviction=eviction)
    older = _remember(cache, "older", 200)
    clock.now_s = 1.0
    newer = _remember(cache, "newer", 100)
    clock.now_s = 3.0
    _draw(cache, 100)
    assert ("d" not in _lie(newer)) is False and "-" in _lie(older)
    assert ("-" in _lie(newer)) == (expected == "both")


def test_a_chunk_counts_for_every_conversation_that_shares_it():
    """The values add up; those whose end is gone count no more."""
    cache, clock = _cache()
    (shared,) = _remember(cache, "a", 1)
    (alone,) = _remember(cache, "b", 1)
    clock.now_s = 2.0
    assert cache.value(shared) == cache.value(alone)
    other = Branch(1.0, tip=alone)
    shared.join(other)
    assert cache.value(shared) == pytest.approx(3 * cache.value(alone))
    cache.forget(alone)
    assert cache.value(shared) == pytest.approx(COST(4) / 2)


def test_chunks_go_to_the_host_by_value_and_from_there_nowhere():
    """The host holds the most valuable of what the device gave up."""
    cache, clock = _cache(num_host_pages=3)
    chunks = _remember(cache, "a", 10)
    clock.now_s = 1.0
    _draw(cache, 2)
    assert _lie(chunks) == "hhdddddddd"
    assert cache.copies_out(free_share=0.0) == ((chunks_page(10), 0), (chunks_page(9), 1))
    _draw(cache, 3)
    assert _lie(chunks) == "--hhhddddd"


def chunks_page(page: int) -> int:
    """Pages are drawn from the lowest on, so the first chunk has the first."""
    return 11 - page


def test_what_costs_less_to_compute_than_to_copy_is_dropped():
    """Both ways count."""
    cache, _ = _cache(num_host_pages=10, copy_s=57.0)  # COST(4) is 104, COST(16) is 116
    chunks = _remember(cache, "a", 10)
    _draw(cache, 5)
    assert _lie(chunks) == "---hhddddd"


def test_nothing_is_copied_ahead_while_something_comes_back():
    """Retrieval goes before eviction."""
    cache, clock = _cache(num_host_pages=10)
    chunks = _remember(cache, "a", 10)
    clock.now_s = 1.0
    pages = _draw(cache, 1)
    cache.copies_out(free_share=0.0)
    cache.restore(chunks[0], pages[0])
    assert cache.copies_out(free_share=1.0) == ()
    assert cache.copies_in() == ((0, pages[0]),)
    assert len(cache.copies_out(free_share=0.5)) == 5


def test_a_page_without_a_name_is_dropped_where_its_contents_are_known():
    """Two pages of the same contents: one is enough."""
    cache, clock = _cache()
    branch = Branch(clock())
    pages = _draw(cache, 3)
    known = cache.add(pages[0], 0, b"x", branch)
    late, other = cache.add(pages[1], 0, None, branch), cache.add(pages[2], 0, None, branch)
    cache.pool.release(pages)
    cache.name(late, b"x")
    cache.name(other, b"y")
    assert _lie([known, late, other]) == "d-d" and cache.find([b"y"]) == [other]
    cache.check_integrity()


def test_keys_say_everything_up_to_the_end_of_their_page():
    """Equal where prompts are equal from the first token on, for weights that are the same."""
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


def test_costs_are_interpolated_between_powers_of_two():
    """And go on beyond them."""
    cost = RecomputeCost.profiled(lambda context: float(context**2), 8)
    assert cost.points == ((1, 1.0), (2, 4.0), (4, 16.0), (8, 64.0))
    assert cost(3) == 10.0 and cost(8) == 64.0 and cost(10) == 88.0


def test_random_use_keeps_the_books():
    """Remembering, finding, sharing, restoring, drawing, shrinking and clearing at random."""
    for seed in range(150):
        rng = random.Random(seed)
        num_pages, host = rng.randint(3, 20), HostPool(rng.choice([0, 2, 30]))
        cache, clock = _cache(num_pages, host=host)
        owned: list[list[int]] = []
        for number in range(60):
            clock.now_s += rng.random()
            action = rng.randrange(6)
            if action == 0 and cache.pool.num_available:
                _remember(cache, str(number // 8), rng.randint(1, cache.pool.num_available))
            elif action == 1 and cache.pool.num_available:
                owned.append(_draw(cache, rng.randint(1, cache.pool.num_available)))
            elif action == 2 and owned:
                cache.pool.release(owned.pop())
            elif action == 3:
                keys = [f"{rng.randint(0, number // 8)} {i}".encode() for i in range(9)]
                for chunk in cache.find(keys):
                    if chunk.page is not None and cache.pool.num_available:
                        cache.pool.share([chunk.page])
                        owned.append([chunk.page])
                    elif chunk.page is None and cache.pool.num_available:
                        owned.append(_draw(cache, 1))
                        if chunk.host_page is not None:
                            cache.restore(chunk, owned[-1][0])
            elif action == 4:
                taken = {host_page for _, host_page in cache.copies_out(free_share=rng.random())}
                assert len(taken) <= cache.max_host_pages
                cache.copies_in()
            elif rng.random() < 0.1:
                cache.forget_uncopied()
                cache.clear(b"new")
            cache.check_integrity()
        for pages in owned:
            cache.pool.release(pages)
        cache.clear(b"")
        assert cache.pool.num_free == cache.pool.num_usable, seed
        assert host.num_free == host.num_pages, seed
