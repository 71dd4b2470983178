"""What comes back for those who wait, and what gives way to it."""

from __future__ import annotations

import random

from jaxserve.memory.chunks import Branch, Chunk
from jaxserve.memory.eviction import CostOverTime, RecomputeCost
from jaxserve.memory.host_pool import HostPool
from jaxserve.memory.page_cache import PageCache
from jaxserve.memory.page_pool import NULL_PAGE
from jaxserve.memory.prefetch import Prefetch

COST = RecomputeCost.analytic(attention=1.0, other=100.0, longest=1024)


class Clock:
    """Says what it is told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _cache(num_pages: int = 11, num_host_pages: int = 100) -> tuple[PageCache, Prefetch, Clock]:
    clock = Clock()
    host = HostPool(num_host_pages)
    cache = PageCache(num_pages, host, 4, CostOverTime(), COST, clock)
    return cache, Prefetch(cache), clock


def _remember(cache: PageCache, name: str, num: int) -> list[Chunk]:
    """`num` chunks of a conversation that was active now, owned by nobody."""
    assert cache.pool.promise(num)
    pages = cache.pool.draw(num)
    branch = Branch(cache._now())
    chunks = []
    for index, page in enumerate(pages):
        chunks.append(cache.add(page, index, f"{name} {index}".encode(), branch))
        branch.tip = chunks[-1]
    cache.pool.release(pages)
    return chunks


def _plan(cache: PageCache, free_share: float = 0.0) -> tuple[tuple, tuple]:
    copies = cache.copies_out(free_share=free_share), cache.copies_in()
    cache.check_integrity()
    return copies


def _go_on(chunks: list[Chunk], now_s: float) -> None:
    """Their conversation is active again."""
    for chunk in chunks:
        chunk.branches[-1].last_active_s = now_s
        chunk.num_uses += 1


def _on_host(cache: PageCache, clock: Clock, num: int = 10) -> list[Chunk]:
    """Chunks on the host alone; those of another conversation have their pages, and copies."""
    chunks = _remember(cache, "awaited", num)
    clock.now_s += 1.0
    _remember(cache, "other", 10)
    _plan(cache)
    clock.now_s += 1.0
    _plan(cache, free_share=1.0)
    assert all(chunk.page is None for chunk in chunks)
    return chunks


def test_what_is_worth_less_and_lies_on_the_host_too_gives_way():
    """A few pages with every plan, the first ones first; afterwards they are cached copies."""
    cache, prefetch, clock = _cache()
    chunks = _on_host(cache, clock)
    available = cache.pool.num_available
    _go_on(chunks, clock.now_s)
    assert prefetch.bring(chunks) == chunks[:8] and prefetch.num_pages == 8
    out, back = _plan(cache, free_share=1.0)
    assert out == () and [host for host, _ in back] == [c.host_page for c in chunks[:8]]
    assert prefetch.bring(chunks) == chunks[8:]
    _plan(cache)
    assert prefetch.bring(chunks) == []
    assert all(cache.is_cached(c) and c.host_page is not None for c in chunks)
    assert cache.pool.num_available == available and cache.pool.num_copied == 10


def test_a_conversation_that_nobody_goes_on_with_outweighs_no_later_one():
    """What gives way is worth less; nothing does where all is worth more."""
    cache, prefetch, clock = _cache()
    chunks = _on_host(cache, clock)
    assert prefetch.bring(chunks) == []


def test_what_has_no_copy_does_not_give_way():
    """Retrieval would make something leave, and that comes second on the link."""
    cache, prefetch, clock = _cache(num_host_pages=12)
    chunks = _remember(cache, "awaited", 10)
    clock.now_s += 1.0
    _remember(cache, "other", 10)
    _plan(cache)
    _go_on(chunks, clock.now_s)
    assert cache.pool.num_copied == 0 and prefetch.bring(chunks) == []


def test_what_leaves_with_the_next_plan_neither_gives_way_nor_comes_back():
    """Its copy is still to be made."""
    cache, prefetch, clock = _cache()
    chunks = _remember(cache, "awaited", 10)
    clock.now_s += 1.0
    (last,) = _remember(cache, "other", 1)
    gone = [chunk for chunk in chunks if chunk.page is None]
    assert gone == chunks[:1] and cache.is_leaving(gone[0])
    cache.forget(last)
    _go_on(chunks, clock.now_s)
    assert cache.pool.num_free == 1 and prefetch.bring(chunks) == []
    _plan(cache)
    assert prefetch.bring(chunks) == gone


def test_those_who_wait_do_not_take_from_each_other():
    """Nor from sequences that were promised what is left."""
    cache, prefetch, clock = _cache()
    chunks = _on_host(cache, clock)
    others = list(cache.on_device.values())
    _go_on(chunks, clock.now_s)
    assert prefetch.bring([*others, *chunks]) == []
    assert cache.pool.promise(10)
    assert prefetch.bring(chunks) == []
    cache.pool.withdraw(3)
    assert len(prefetch.bring(chunks)) == 8
    assert cache.pool.num_available == 3


def test_random_use_keeps_the_books():
    """Remembering, drawing, releasing, forgetting, restoring and waiting, between plans."""
    num_brought = 0
    for seed in range(1000):
        rng = random.Random(seed)
        cache, prefetch, clock = _cache(rng.randint(3, 20), rng.choice([3, 30]))
        owned: list[list[int]] = []
        known: list[Chunk] = []
        for number in range(30):
            clock.now_s += rng.random()
            action, room = rng.randrange(5), cache.pool.num_available
            if action <= 1 and room:
                known += _remember(cache, str(number), rng.randint(1, room))
            elif action == 2 and room:
                count = rng.randint(1, room)
                assert cache.pool.promise(count)
                owned.append(cache.pool.draw(count))
            elif action == 3 and owned:
                cache.pool.release(owned.pop())
            elif action == 4 and known:
                cache.forget(rng.choice(known))
            awaited = [c for c in known if c.is_resident]
            awaited = rng.sample(awaited, min(len(awaited), rng.randint(0, 12)))
            if rng.random() < 0.5:
                _go_on(awaited, clock.now_s)
            before = {c: cache.order(c) for c in cache.on_device.values()}
            lossless = {c for c in before if cache.is_cached(c) and c.host_page is not None}
            counts = cache.pool.num_available, cache.pool.num_copied + cache.pool.num_free
            leaving = {c.host_page for c in known if cache.is_leaving(c)}
            brought = prefetch.bring(awaited)
            num_brought += len(brought)
            assert counts == (
                cache.pool.num_available,
                cache.pool.num_copied + cache.pool.num_free,
            ), seed
            for gone in (c for c in before if c.page is None):
                assert gone in lossless and gone not in awaited, seed
                assert before[gone] < max(map(cache.order, brought)), seed
            cache.check_integrity()
            if rng.random() < 0.8:
                out, back = _plan(cache, rng.random())
                assert len({page for _, page in back} - {NULL_PAGE}) == len(back) <= 8, seed
                assert not back or {host_page for _, host_page in out} == leaving, seed
        for pages in owned:
            cache.pool.release(pages)
    assert num_brought > 3000, num_brought
