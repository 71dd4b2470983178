"""Snapshots of states are found by their tokens, and evicted as their retention says."""

from __future__ import annotations

import random
from typing import get_args

import pytest

from jaxserve.memory.cached_page import PageKeys
from jaxserve.memory.snapshots import (
    Grid,
    HostStateCopy,
    LearnedReuse,
    Marconi,
    Prefix,
    Snapshot,
    SnapshotCache,
    SnapshotKind,
    StateCopy,
    StateRetention,
)

pytestmark = pytest.mark.fast

KINDS = get_args(SnapshotKind)
RETENTIONS = (LearnedReuse(), Grid(8), Marconi(weight=0.5, state_tokens=16))
PAGE = 4


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _cache(
    num_entries: int, clock: _Clock, retention: StateRetention = RETENTIONS[0], num_on_host: int = 0
) -> SnapshotCache:
    return SnapshotCache(num_entries, PAGE, retention, clock, num_on_host)


def _prefix(*tokens: int) -> Prefix:
    keys = PageKeys()
    own = keys.of(tokens, PAGE, b"weights")
    return (keys.root, *own), tokens


def _is_on_device(cache: SnapshotCache, snapshot: Snapshot) -> bool:
    return cache.entries_of(snapshot)[0] is not None


def _named(cache: SnapshotCache, *tokens: int, kind: SnapshotKind = "end") -> Snapshot:
    snapshot = cache.save(0, 0, len(tokens), kind)
    assert snapshot is not None
    cache.name(snapshot, _prefix(*tokens))
    return snapshot


def test_the_most_tokens_are_found():
    """Of several snapshots in one page, that with the most of the tokens; else of a page before."""
    cache = _cache(5, _Clock())
    for tail in ((), (1, 2), (1, 2, 3), (1, 9, 9)):
        _named(cache, 7, 7, 7, 7, *tail)
    _named(cache, 7)

    def found(*tokens: int) -> int | None:
        snapshot = cache.find(_prefix(*tokens))
        return None if snapshot is None else snapshot.position

    assert found(7, 7, 7, 7, 1, 2, 3, 4, 5) == 7
    assert found(7, 7, 7, 7, 1, 2) == 6
    assert found(7, 7, 7, 7, 5) == 4
    assert found(7, 7, 7, 5) == 1
    assert found(5, 7, 7, 7, 1, 2) is None


def test_the_least_valuable_is_evicted():
    """It saves the fewest tokens for its age; one that the next plan reads stays."""
    clock = _Clock()
    cache = _cache(3, clock)
    old, short, long = (_named(cache, *[n] * n) for n in (50, 10, 100))
    cache.take_copies()
    clock.now_s = 10.0
    cache.restore(short)  # used now
    _named(cache, *range(30))
    assert [_is_on_device(cache, each) for each in (old, long, short)] == [False, True, True]
    clock.now_s = 1000.0
    _named(cache, 1)
    assert all(_is_on_device(cache, each) for each in (short, long))  # the next plan reads `short`
    cache.take_copies()
    clock.now_s = 2000.0
    _named(cache, 2)
    assert _is_on_device(cache, short) and cache.find(_prefix(1)) is None
    cache.check_integrity()


def test_conversations_that_have_gone_on_are_worth_less():
    """Ends of answers are used once; a place where prompts part is used by each of them."""
    clock = _Clock()
    cache = _cache(6, clock)
    shared = _named(cache, *range(20), kind="branch")
    for turn in range(20):
        clock.now_s += 1.0
        before = _named(cache, *[turn] * 100)
        cache.take_copies()
        cache.restore(before)
        cache.restore(shared)
        cache.take_copies()
    new = [_named(cache, *[100 + i] * 100) for i in range(5)]
    assert all(_is_on_device(cache, each) for each in (shared, *new))


def test_a_state_is_worth_what_others_do_not_save():
    """It saves the tokens after the longest other state that is known to begin likewise."""
    cache = _cache(4, _Clock())
    long, short = _named(cache, *range(40)), _named(cache, *range(10))
    assert (long.num_saved_tokens, short.num_saved_tokens) == (40, 10)
    middle = _named(cache, *range(20))
    assert (long.num_saved_tokens, middle.num_saved_tokens) == (20, 10)
    cache.evict(short)
    assert (long.num_saved_tokens, middle.num_saved_tokens) == (20, 20)
    cache.evict(middle)
    assert long.num_saved_tokens == 40
    cache.check_integrity()


def test_marconi_evicts_by_recency_and_work_saved():
    """`weight` says which counts; a state with two states after it stays."""
    for weight, evicted in ((0.0, "old"), (4.0, "short")):
        clock = _Clock()
        cache = _cache(4, clock, Marconi(weight=weight, state_tokens=16))
        found = {"shared": _named(cache, *range(8), kind="branch")}
        for at_s, name, tokens in ((1.0, "old", 40), (2.0, "short", 1), (3.0, "new", 30)):
            clock.now_s = at_s
            found[name] = _named(cache, *range(8), *[tokens] * tokens)
        cache.take_copies()
        clock.now_s = 4.0
        _named(cache, 99)
        assert [name for name in found if not _is_on_device(cache, found[name])] == [evicted]


def test_a_grid_evicts_the_least_recently_used():
    clock = _Clock()
    cache = _cache(2, clock, Grid(8))
    first, second = _named(cache, *range(8)), _named(cache, *range(16))
    cache.take_copies()
    clock.now_s = 1.0
    cache.restore(first)
    cache.take_copies()
    _named(cache, *range(24))
    assert _is_on_device(cache, first) and not _is_on_device(cache, second)


def test_equal_tokens_are_kept_once():
    """The second snapshot of the same tokens is dropped with its copy."""
    cache = _cache(3, _Clock())
    entry, _ = cache.entries_of(_named(cache, 5, 5))
    _named(cache, 5, 5)
    assert cache.num_held == 1 and [copy.entry for copy in cache.take_copies()] == [entry]


def test_states_that_leave_the_device_go_to_the_host():
    """Also before any plan has copied them; the host evicts what is worth the least, too."""
    clock = _Clock()
    cache = _cache(1, clock, Grid(8), num_on_host=2)
    for tokens in ((1,), (2,), (3,), (4,)):
        clock.now_s += 1.0
        _named(cache, *tokens)
        cache.check_integrity()
    copies = cache.take_copies()
    saves = [copy for copy in copies if isinstance(copy, StateCopy)]
    out = [copy for copy in copies if isinstance(copy, HostStateCopy)]
    assert len(saves) == 3 and len({copy.host_entry for copy in out}) == len(out) == 2
    assert copies == (saves[0], out[0], saves[1], out[1], saves[2])
    assert (cache.num_held, cache.num_on_host) == (1, 2)
    assert [cache.find(_prefix(token)) is None for token in (1, 2, 3, 4)] == [True] + 3 * [False]


def test_a_state_on_the_host_comes_back():
    """It takes the place of one that is worth less; else its slot gets it from the host alone."""
    clock = _Clock()
    cache = _cache(1, clock, num_on_host=2)
    short, long = _named(cache, 1), _named(cache, *range(40))
    cache.take_copies()
    places = [[entry is None for entry in cache.entries_of(each)] for each in (short, long)]
    assert places == [[True, False], [False, True]]
    cache.restore(short)
    assert not _is_on_device(cache, short) and cache.take_copies() == ()
    other = _named(cache, *range(50, 52))  # it takes the only entry
    cache.take_copies()
    assert not _is_on_device(cache, long) and _is_on_device(cache, other)
    cache.restore(long)
    assert _is_on_device(cache, long) and not _is_on_device(cache, other)
    *_, last = cache.take_copies()
    assert last == HostStateCopy(*cache.entries_of(long), goes_out=False)
    assert (cache.num_out, cache.num_in) == (3, 2)
    cache.check_integrity()


def test_a_host_without_memory_is_used_no_longer():
    """States are evicted as without it."""
    cache = _cache(1, _Clock(), num_on_host=2)
    _named(cache, 1)
    _named(cache, 2)
    cache.clear()
    cache.close_host()
    _named(cache, 3)
    _named(cache, 4)
    assert (cache.num_held, cache.num_on_host, cache.num_out) == (1, 0, 1)
    cache.check_integrity()


@pytest.mark.parametrize("has_host", [False, True])
@pytest.mark.parametrize("retention", RETENTIONS, ids=lambda each: type(each).__name__)
def test_random_traces(retention, has_host):
    """Every entry is free or held, and has the newest copy that was asked for, on both tiers."""
    num_in = 0
    for seed in range(20):
        rng, clock = random.Random(seed), _Clock()
        cache = _cache(rng.randint(1, 6), clock, retention, has_host * rng.randint(1, 6))
        unread, contents, on_host = [], {}, {}
        for _ in range(60):
            clock.now_s += rng.random()
            for _ in range(rng.randint(0, 3)):
                tokens = tuple(rng.choices((1, 2), k=rng.randint(1, 12)))
                snapshot = cache.save(_slot(tokens), 0, len(tokens), rng.choice(KINDS))
                if snapshot is not None:
                    unread.append((snapshot, tokens))
            rng.shuffle(unread)
            while unread and rng.random() < 0.7:
                snapshot, tokens = unread.pop()
                if rng.random() < 0.2:
                    cache.evict(snapshot)
                else:
                    cache.name(snapshot, _prefix(*tokens))
            wanted = tuple(rng.choices((1, 2), k=12))
            read = cache.find(_prefix(*wanted))
            if read is not None:
                cache.restore(read)
            if rng.random() < 0.05:
                cache.drop_uncopied()
            if rng.random() < 0.02:
                cache.clear()
            for copy in cache.take_copies():
                if isinstance(copy, StateCopy):
                    contents[copy.entry] = copy.slot
                elif copy.goes_out:
                    on_host[copy.host_entry] = contents[copy.entry]
                else:
                    contents[copy.entry] = on_host[copy.host_entry]
            if read is not None:
                tiers = zip((contents, on_host), cache.entries_of(read), strict=True)
                kept = {tier[entry] for tier, entry in tiers if entry is not None}
                assert kept <= {_slot(wanted[: read.position])}, f"seed {seed}"
            cache.check_integrity()
        num_in += cache.num_in
    assert (num_in > 0) == has_host


def _slot(tokens: tuple[int, ...]) -> int:
    """Return a number of these tokens alone, for what is copied from a slot."""
    return int("".join(map(str, tokens)))
