"""How much memory `auto` leaves free depends on what a preemption costs."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.core.prediction import LengthPrediction
from jaxserve.execution.step_cost import FlatCost
from jaxserve.planning import simulate
from jaxserve.predictor import LengthBuckets
from jaxserve.scheduling.admission import Expected
from jaxserve.scheduling.kv.manager import SwapCosts
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.workload import random_items
from tests.scheduling.simulated import engine_of, request_of

CONFIG = EngineConfig(
    page_size=8, num_pages=33, max_slots=16, max_context=256, max_decode_iterations=8
)
# Of every answer only the longest and the shortest length is known.
ANY_LENGTH = LengthPrediction(LengthBuckets((0, 48)), np.ones(1))


def _num_preempted(token_s: float) -> int:
    items = random_items(
        64, num_prompt_tokens=16, num_output_tokens=48, min_output_tokens=1, vocab_size=99, seed=3
    )
    done = simulate(
        items,
        PRESETS["auto"],
        CONFIG,
        FlatCost(),
        predictions=[ANY_LENGTH] * len(items),
        swap_costs=SwapCosts(page_s=token_s, token_s=token_s),
        progress=False,
    )
    assert all(completion.error is None for completion in done.completions)
    return done.stats.num_preemptions


@pytest.mark.parametrize("margin", [None, 1.0])
def test_requests_that_are_asked_for_together_leave_as_much_free(margin: float | None):
    """A headroom that knows what follows says of each request what one that does not says."""
    scheduler = _scheduler(np.random.default_rng(0), num_waiting=12)
    admission, lengths = Expected(margin), scheduler.lengths
    together, alone = (
        admission.headroom((), CONFIG, lengths, lambda: 5.0 if margin is None else None)
        for _ in range(2)
    )
    waiting = list(scheduler.waiting)
    found = []
    while waiting:
        sequence = waiting.pop(0)
        pages = together.pages(sequence, lambda: waiting), alone.pages(sequence)
        found.append(pages)
        together.admitted(sequence)
        alone.admitted(sequence)
    assert all(ours == theirs for ours, theirs in found) and len(set(found)) > 3, found


def _scheduler(rng: np.random.Generator, num_waiting: int) -> Scheduler:
    engine = engine_of("auto", CONFIG)
    buckets = LengthBuckets.equal_width(64, 4)
    for number in range(num_waiting):
        weights = rng.random(4)
        known = LengthPrediction(buckets, weights / weights.sum()) if number % 3 else None
        prompt, most = tuple(range(int(rng.integers(1, 90)))), int(rng.integers(1, 150))
        engine.add(request_of(str(number), prompt, prediction=known, max_tokens=most))
    return engine.scheduler


def test_what_comes_later_than_a_preemption_costs_has_no_weight():
    """Free preemptions leave nothing free, whatever is predicted; dear ones leave the peak."""

    def pages(cost: float, longest: int) -> int:
        known = LengthPrediction(LengthBuckets((0, longest - 1, longest)), np.eye(2)[1])
        engine = engine_of("auto", CONFIG)
        for name in "ab":
            engine.add(request_of(name, (1,) * 16, prediction=known, max_tokens=100))
        first, second = engine.scheduler.waiting
        headroom = Expected().headroom((), CONFIG, engine.scheduler.lengths, lambda: cost)
        headroom.admitted(first)
        return headroom.pages(second)

    for longest in (20, 80):
        found = [pages(cost, longest) for cost in (0.0, 5.0, 1e9)]
        assert found[0] == pages(0.0, 50) < found[1] < found[2], found
    assert pages(1e9, 20) < pages(1e9, 80)


@pytest.mark.release
def test_a_pool_is_filled_where_preemptions_cost_little():
    """And fewer sequences are preempted where each of their tokens costs ten iterations."""
    assert _num_preempted(1e-2) < 0.5 * _num_preempted(1e-7)
