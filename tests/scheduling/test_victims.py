"""Sequences are preempted by expected need, and ranked once for all preemptions of a step."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.core.prediction import LengthPrediction
from jaxserve.engine.engine import Engine
from jaxserve.predictor import LengthBuckets
from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.preemption import LastInOrder, LongestRemaining
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step import Victims
from tests.scheduling.simulated import engine_of, request_of

CONFIG = EngineConfig(
    num_pages=400, max_slots=16, max_context=200, max_step_tokens=64, max_decode_iterations=1
)
BUCKETS = LengthBuckets.equal_width(80, 8)


def _running(num_bounded: int = 0, *, predicted: bool = True) -> tuple[Engine, list[Sequence]]:
    """Return an engine after some steps, and what runs; the first ones in order have bounds."""
    rng, engine = np.random.default_rng(0), engine_of("auto", CONFIG)
    for number in range(CONFIG.max_slots):
        bound = 1e6 if number < num_bounded else None
        prediction = LengthPrediction(BUCKETS, rng.dirichlet(np.ones(BUCKETS.num)))
        known = prediction if predicted else None
        prompt = (1,) * int(rng.integers(1, 30))
        params = dict(max_tokens=80, ignore_eos=True, latency_bound=bound)
        engine.add(request_of(str(number), prompt, prediction=known, **params))
    for _ in range(12):
        engine.step()
    return engine, list(engine.scheduler.running)


class _Counting:
    """Last in order, and how often it was asked."""

    keeps_state = False

    def __init__(self) -> None:
        self.num_asked = 0

    def ranked(self, candidates: Seq[Sequence], lengths: LengthTracker) -> Seq[Sequence]:
        self.num_asked += 1
        return LastInOrder().ranked(candidates, lengths)


def test_the_longest_is_first_and_bounds_are_last():
    """The order is that of choosing the longest remaining one again and again."""
    engine, running = _running(num_bounded=5)
    lengths = engine.scheduler.lengths
    remaining = dict(zip(running, lengths.expected_tokens(running), strict=True))
    assert len(set(remaining.values())) > 8
    ranked = LongestRemaining().ranked(running, lengths)
    wanted = sorted(running, key=lambda each: (each.request.has_bounds, -remaining[each]))
    assert list(ranked) == wanted


def test_what_would_end_last_is_preempted_last():
    """Of those that are in the tail, the last in order goes first."""
    engine, running = _running()
    lengths = engine.scheduler.lengths
    assert lengths.find_tail(running, 16, arrivals_an_iteration=0.0, slack=0.0)
    late = [each for each in running if each.key in lengths.tail]
    assert 2 < len(late) < len(running) - 2
    ranked = list(LongestRemaining().ranked(running, lengths))
    assert ranked[-len(late) :] == late[::-1]
    remaining = lengths.expected_tokens(ranked[: -len(late)])
    assert remaining == sorted(remaining, reverse=True) and remaining[0] < min(
        lengths.tail.values()
    )
    assert lengths.find_tail(running, 16, arrivals_an_iteration=1.0, slack=0.0) and not lengths.tail


def test_without_estimates_the_last_in_order_is_first():
    """Bounded sequences still stay as long as there are others."""
    engine, running = _running(num_bounded=3, predicted=False)
    ranked = list(LongestRemaining().ranked(running, engine.scheduler.lengths))
    bounded = [each for each in running if each.request.has_bounds]
    unbounded = [each for each in running if not each.request.has_bounds]
    assert ranked == [*reversed(unbounded), *reversed(bounded)] and len(bounded) == 3


def test_what_a_step_preempts():
    """Those with rows stay, the first goes when it is alone, and one ranking serves all."""
    engine, running = _running()
    policy = _Counting()
    victims = Victims(policy, engine.scheduler.lengths)
    have_rows = {running[15], running[13]}
    left = list(running)
    for wanted in (running[14], *running[12:0:-1]):
        victim = victims.next(left, have_rows)
        assert victim is wanted
        left.remove(victim)
    assert policy.num_asked == 1
    assert victims.next(left, have_rows) is running[0]
    victims.forget_ranks()
    assert victims.next(running, have_rows) is running[14] and policy.num_asked == 2
