"""Routing balances different prompts, groups equal ones, and is bounded in every case."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.predictor import LengthBuckets
from jaxserve.scheduling.router import Router, page_hashes, predicted_tokens
from tests.common.tiers import examples, seeds

PAGE = 4
WEIGHT = 4.0


def _router(num_replicas: int = 3, **options) -> Router:
    return Router(num_replicas, page_size=PAGE, cached_weight=WEIGHT, **options)


def _prompt(seed: int, num_pages: int = 3) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(1000), k=PAGE * num_pages))


def test_hashes_tell_prefixes_apart():
    """They are equal exactly up to the first different page; a partial page has none."""
    one, two = _prompt(1), _prompt(2)
    assert page_hashes(one, PAGE) == page_hashes(tuple(one), PAGE)
    assert len(page_hashes(one[:-1], PAGE)) == 2
    shared = page_hashes(one[:PAGE] + two, PAGE)
    assert shared[0] == page_hashes(one, PAGE)[0]
    assert not set(shared[1:]) & {*page_hashes(one, PAGE), *page_hashes(two, PAGE)}
    assert page_hashes("a text of some pages", 8)[:1] == page_hashes("a text of", 8)


def test_predicted_tokens_end_at_the_context():
    """The prompt and every sample count, each limited by the context."""
    assert predicted_tokens(10, SamplingParams(max_tokens=5), max_context=100) == 15
    assert predicted_tokens(90, SamplingParams(max_tokens=50), max_context=100) == 100
    assert predicted_tokens(90, SamplingParams(max_tokens=None), max_context=100) == 100
    params = SamplingParams(max_tokens=5, n=3, temperature=1.0)
    assert predicted_tokens(10, params, max_context=100) == 25
    sure = LengthPrediction(LengthBuckets((0, 3, 4, 100)), np.asarray([0.0, 1.0, 0.0]))
    assert predicted_tokens(10, params, sure, max_context=100) == 10 + 3 * 4
    assert predicted_tokens(10, SamplingParams(max_tokens=2), sure, max_context=100) == 12


@seeds(300)
def test_strangers_go_to_the_least_work(seeds):
    """The replicas' loads stay within one request of each other."""
    router, rng = _router(), random.Random(0)
    for seed in seeds:
        router.route(page_hashes(_prompt(seed), PAGE), rng.randint(1, 100))
        assert max(router.work) - min(router.work) <= 100
    assert min(router.work) > 0


def test_idle_replicas_take_turns():
    """Conversations that begin one after the other on idle replicas are spread."""
    router = _router()
    chosen = []
    for seed in range(3):
        chosen.append(router.route(page_hashes(_prompt(seed), PAGE), 50))
        router.finish(chosen[-1], 50)
    assert sorted(chosen) == [0, 1, 2]


def test_a_conversation_stays_where_its_pages_are():
    """Every turn resends the history; the replicas' other loads differ by little."""
    router, history = _router(), _prompt(1, num_pages=8)
    home = router.route(page_hashes(history, PAGE), 40)
    router.finish(home, 40)
    for turn in range(2, 10):
        router.route(page_hashes(_prompt(100 + turn), PAGE), 40)
        history += _prompt(turn, num_pages=2)
        assert router.route(page_hashes(history, PAGE), 60) == home
        router.finish(home, 60)


def test_an_overloaded_home_spills_over():
    """Beyond the lead that cached tokens justify, a request goes elsewhere; both then have it."""
    router, pages = _router(2), page_hashes(_prompt(1), PAGE)
    assert router.route(pages, 0) == 0
    worth = int(WEIGHT * len(pages) * PAGE)
    router.route([], worth + 1, among=[0])
    assert router.route(pages, 1) == 1
    assert [router.num_remembered(replica) for replica in (0, 1)] == [len(pages)] * 2
    assert router.route(pages, 1) == 1, "the least work of those that have its pages"


@seeds(64)
def test_a_shared_system_prompt_leaves_no_replica_idle(seeds):
    """A prefix that all replicas have does not gather requests on one of them."""
    router, system = _router(4), _prompt(0, num_pages=16)
    for seed in seeds:
        router.route(page_hashes(system + _prompt(seed + 1), PAGE), 100)
    assert max(router.work) - min(router.work) <= WEIGHT * len(system) + 100


def test_a_dead_replica_is_removed_from_the_router():
    """Its pages attract no requests and its work is 0; only allowed replicas are chosen."""
    router, pages = _router(2), page_hashes(_prompt(1), PAGE)
    home = router.route(pages, 500)
    router.forget(home)
    assert router.work == (0, 0) and router.num_remembered(home) == 0
    assert router.route(pages, 10, among=[1 - home]) == 1 - home
    assert router.route(pages, 10) == 1 - home


@seeds(50)
@pytest.mark.parametrize("max_pages", [1, 10])
def test_memory_is_bounded(seeds, max_pages):
    """The most recent pages are remembered, and a prompt's first pages before its last."""
    router = _router(1, max_pages=max_pages)
    for seed in seeds:
        router.route(page_hashes(_prompt(seed, num_pages=seed % 20), PAGE), 1)
        assert router.num_remembered(0) <= max_pages
    long = page_hashes(_prompt(99, num_pages=30), PAGE)
    two = _router(2, max_pages=max_pages)
    home = two.route(long, 0)
    assert two.route(long[:1], 0) == home, "the first page is remembered"


@examples(8, 250)
@given(st.data())
def test_no_replica_is_ahead_by_more_than_what_it_has_cached(data):
    """The chosen replica's lead over the least work is at most what its cached tokens justify.

    A replica without work is chosen when no other is worth waiting for. When all requests have
    ended, no work is left.
    """
    num_replicas = data.draw(st.integers(1, 4))
    router = _router(num_replicas, max_pages=data.draw(st.integers(1, 20)))
    open_requests: list[tuple[int, int]] = []
    for _ in range(data.draw(st.integers(1, 60))):
        if open_requests and data.draw(st.booleans()):
            router.finish(*open_requests.pop(data.draw(st.integers(0, len(open_requests) - 1))))
            continue
        prompt = _prompt(data.draw(st.integers(0, 3)), data.draw(st.integers(0, 6)))
        among = data.draw(st.sets(st.integers(0, num_replicas - 1), min_size=1))
        before, work = router.work, data.draw(st.integers(1, 400))
        chosen = router.route(page_hashes(prompt, PAGE), work, among=among)
        assert chosen in among
        lead = before[chosen] - min(before[replica] for replica in among)
        assert lead <= WEIGHT * len(prompt)
        open_requests.append((chosen, work))
    for request in open_requests:
        router.finish(*request)
    assert router.work == (0,) * num_replicas
