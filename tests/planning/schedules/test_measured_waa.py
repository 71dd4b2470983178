"""Plans for two device groups from measured step times, against the real scheduler."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.core.errors import DeviceMemoryError
from jaxserve.planning.schedules import LatencyBounds, lengths_of
from jaxserve.planning.schedules.measured_waa import WAAPlanner
from jaxserve.scheduling.iteration.waa import WAA
from tests.common.tiers import some
from tests.planning.schedules.step_times import CONFIG, GROUPS, lowest_s, rate, served, spent_s

PLANNER = WAAPlanner(times=GROUPS, config=lambda: CONFIG)
# Mean prompts and answers: decoding limits the first, encoding the second.
TASKS = {"long answers": (60, 64), "long prompts": (200, 8)}


def _lengths(task: str) -> list[tuple[int, int]]:
    rng = random.Random(3)
    return [
        tuple(rng.randint(mean // 2, 3 * mean // 2) for mean in TASKS[task]) for _ in range(300)
    ]


@pytest.mark.release
@pytest.mark.parametrize("share", some([1.05, 2.5, math.inf]))
@pytest.mark.parametrize("task", TASKS)
def test_a_plan_keeps_its_bound_in_the_simulation(task: str, share: float):
    """From just above the lowest bound to none: throughput within 15 %, answers in time."""
    lengths = _lengths(task)
    bound_s = share * lowest_s(PLANNER, lengths_of(lengths))
    plan = PLANNER.plan(lengths_of(lengths), LatencyBounds(latency_s=bound_s), num_lengths=300)
    assert plan.latency_s <= bound_s and plan.family == "waa"
    shape = plan.iteration()
    assert isinstance(shape, WAA) and shape.encode_batch == plan.schedule.encode_batch
    timings = served(lengths, shape, GROUPS.costs())
    assert plan.answers_per_s == pytest.approx(rate(timings), rel=0.15)
    assert np.mean(spent_s(timings) <= bound_s) >= 0.99


def test_a_longer_bound_serves_no_less():
    """Throughput rises with the bound, and every bound is kept by the estimate."""
    task = lengths_of(_lengths("long answers"))
    lowest = lowest_s(PLANNER, task)
    bounds = [LatencyBounds(latency_s=share * lowest) for share in (1.01, 2, 3, 5, 8)]
    plans = [PLANNER.plan(task, bound, num_lengths=1) for bound in bounds]
    rates = [plan.answers_per_s for plan in plans]
    assert rates == sorted(rates) and rates[-1] > 2 * rates[0]
    assert all(plan.keeps_bounds for plan in plans)
    first = LatencyBounds(first_token_s=1.1 * plans[0].first_token_s)
    assert PLANNER.plan(task, first, num_lengths=1).first_token_s <= first.first_token_s


def test_a_bound_that_no_schedule_keeps_has_a_nearest_one():
    """It has the lowest latency; other lengths change what it is expected to do."""
    task = lengths_of(_lengths("long answers"))
    lowest = lowest_s(PLANNER, task)
    bounds = LatencyBounds(latency_s=lowest / 2)
    nearest = PLANNER.nearest(task, bounds, num_lengths=300)
    assert nearest.latency_s == pytest.approx(lowest) and not nearest.keeps_bounds
    assert nearest.lowest == {"latency_s": pytest.approx(lowest)}
    same = PLANNER.expected(nearest, task, num_lengths=300)
    assert replace(same, search_s=0.0, lowest=nearest.lowest) == replace(nearest, search_s=0.0)
    longer = lengths_of([(i, 2 * o) for i, o in _lengths("long answers")])
    assert PLANNER.expected(nearest, longer, num_lengths=300).latency_s > 1.5 * lowest


def test_answers_that_do_not_fit_are_refused():
    """One answer is expected to need more pages than there are."""
    planner = WAAPlanner(times=GROUPS, config=lambda: replace(CONFIG, num_pages=30))
    with pytest.raises(DeviceMemoryError, match="more pages than the page pool"):
        planner.plan(lengths_of([(400, 400)]), LatencyBounds(), num_lengths=1)
