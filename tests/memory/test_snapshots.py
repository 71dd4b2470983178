"""Snapshots of states are found by their tokens; the least valuable one is evicted."""

from __future__ import annotations

import random
from typing import get_args

import pytest

from jaxserve.memory.snapshots import SnapshotCache, SnapshotKind

pytestmark = pytest.mark.fast

KINDS = get_args(SnapshotKind)


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _named(cache: SnapshotCache, position: int, key: bytes, tail: tuple[int, ...] = ()):
    snapshot = cache.save(0, 0, position, "end")
    assert snapshot is not None
    cache.name(snapshot, position, key, tail)
    return snapshot


def test_the_longest_tail_is_found():
    """Of several snapshots in one page, that with the most of the tokens."""
    cache = SnapshotCache(4, _Clock())
    for tail in ((), (1, 2), (1, 2, 3), (1, 9, 9, 9)):
        _named(cache, 8 + len(tail), b"page", tail)
    assert cache.find(b"page", (1, 2, 3, 4)).tail == (1, 2, 3)
    assert cache.find(b"page", (1, 2)).tail == (1, 2)
    assert cache.find(b"page", (7,)).tail == ()
    assert cache.find(b"other", (1, 2)) is None


def test_the_least_valuable_is_evicted():
    """It saves the fewest tokens for its age; one that the next plan reads stays."""
    clock = _Clock()
    cache = SnapshotCache(3, clock)
    old, short, long = (_named(cache, n, b"%d" % n) for n in (50, 10, 100))
    cache.take_saves()
    clock.now_s = 10.0
    cache.restore(short)  # used now
    _named(cache, 30, b"new")
    assert (old.entry, long.entry is None, short.entry is None) == (None, False, False)
    clock.now_s = 1000.0
    _named(cache, 1, b"another")
    assert short.entry is not None and long.entry is not None  # the next plan reads `short`
    cache.take_saves()
    clock.now_s = 2000.0
    _named(cache, 1, b"last")
    assert short.entry is not None and cache.find(b"another", ()) is None
    cache.check_integrity()


def test_conversations_that_have_gone_on_are_worth_less():
    """Ends of answers are used once; a place where prompts part is used by each of them."""
    clock = _Clock()
    cache = SnapshotCache(6, clock)
    shared = cache.save(0, 0, 20, "branch")
    cache.name(shared, 20, b"shared", ())
    for turn in range(20):
        clock.now_s += 1.0
        before = _named(cache, 100, b"%d" % turn)
        cache.take_saves()
        cache.restore(before)
        cache.restore(shared)
        cache.take_saves()
    new = [_named(cache, 100, b"new %d" % i) for i in range(5)]
    assert shared.entry is not None and all(each.entry is not None for each in new)


def test_equal_tokens_are_kept_once():
    """The second snapshot of the same tokens is dropped with its copy."""
    cache = SnapshotCache(3, _Clock())
    first = _named(cache, 5, b"page", (1,))
    _named(cache, 5, b"page", (1,))
    assert cache.num_held == 1 and [copy.entry for copy in cache.take_saves()] == [first.entry]


def test_random_traces():
    """Every entry is free or held, and has the newest copy that was asked for."""
    for seed in range(50):
        rng, clock = random.Random(seed), _Clock()
        cache = SnapshotCache(rng.randint(1, 6), clock)
        unread, contents = [], {}
        for step in range(60):
            clock.now_s += rng.random()
            for _ in range(rng.randint(0, 3)):
                position = rng.randint(1, 40)
                snapshot = cache.save(position, step, position, rng.choice(KINDS))
                if snapshot is not None:
                    unread.append((snapshot, position))
            rng.shuffle(unread)
            while unread and rng.random() < 0.7:
                snapshot, position = unread.pop()
                if rng.random() < 0.2:
                    cache.evict(snapshot)
                else:
                    cache.name(snapshot, position, b"%d" % (position // 8), (position % 8,))
            read = cache.find(b"%d" % rng.randint(0, 5), (rng.randint(0, 7),))
            if read is not None:
                cache.restore(read)
            if rng.random() < 0.05:
                cache.drop_unsaved()
                read = None if read is None or read.entry is None else read
            if rng.random() < 0.02:
                cache.clear()
                read = None
            for copy in cache.take_saves():
                contents[copy.entry] = copy.slot
            if read is not None and read.entry is not None:
                assert contents[read.entry] == read.position, f"seed {seed}"
            cache.check_integrity()
