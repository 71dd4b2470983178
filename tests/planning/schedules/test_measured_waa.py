"""Plans for two device groups from measured step times, against the real scheduler."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.core.errors import DeviceMemoryError, InfeasibleBoundError
from jaxserve.planning import GroupTimes, simulate
from jaxserve.planning.schedules import LatencyBounds, lengths_of
from jaxserve.planning.schedules.measured_waa import WAAPlanner
from jaxserve.scheduling.admission import OnDemand
from jaxserve.scheduling.iteration.waa import WAA
from jaxserve.scheduling.order import FCFS
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.retention import Stateless
from jaxserve.workload import WorkloadItem
from tests.common.tiers import some
from tests.planning.schedules.step_times import CONFIG, like_a_small_model

TIMES = GroupTimes(
    groups=(like_a_small_model(), like_a_small_model()), handover_s=1e-3, page_s=2e-4
)
PLANNER = WAAPlanner(times=TIMES, config=lambda: CONFIG)
# Mean prompts and answers: decoding limits the first, encoding the second.
TASKS = {"long answers": (60, 64), "long prompts": (200, 8)}


def _lengths(task: str) -> list[tuple[int, int]]:
    rng = random.Random(3)
    return [
        tuple(rng.randint(mean // 2, 3 * mean // 2) for mean in TASKS[task]) for _ in range(300)
    ]


def _simulated(lengths: list[tuple[int, int]], shape: WAA) -> tuple[float, np.ndarray]:
    """Simulate answers that all wait; return answers/s of the middle third, and all seconds."""
    simulation = simulate(
        [WorkloadItem(prompt_token_ids=(1,) * i, num_output_tokens=o) for i, o in lengths],
        Policy("waa", OnDemand(), FCFS(), shape, Stateless()),
        CONFIG,
        TIMES.costs(),
        progress=False,
    )
    timings = [completion.timing for completion in simulation.completions]
    ends = np.sort([timing.finished_s or 0.0 for timing in timings])
    low, high = len(ends) // 3, 2 * len(ends) // 3
    spent = [(timing.finished_s or 0.0) - (timing.admitted_s or 0.0) for timing in timings]
    return (high - low) / (ends[high] - ends[low]), np.array(spent)


@pytest.mark.release
@pytest.mark.parametrize("share", some([1.05, 2.5, math.inf]))
@pytest.mark.parametrize("task", TASKS)
def test_a_plan_keeps_its_bound_in_the_simulation(task: str, share: float):
    """From just above the lowest bound to none: throughput within 15 %, answers in time."""
    lengths = _lengths(task)
    bound_s = share * _lowest_s(task)
    plan = PLANNER.plan(lengths_of(lengths), LatencyBounds(latency_s=bound_s), num_lengths=300)
    assert plan.latency_s <= bound_s and plan.family == "waa"
    shape = plan.iteration()
    assert isinstance(shape, WAA) and shape.encode_batch == plan.schedule.encode_batch
    throughput, spent = _simulated(lengths, shape)
    assert plan.answers_per_s == pytest.approx(throughput, rel=0.15)
    assert np.mean(spent <= bound_s) >= 0.99


def _lowest_s(task: str) -> float:
    with pytest.raises(InfeasibleBoundError) as refused:
        PLANNER.plan(lengths_of(_lengths(task)), LatencyBounds(latency_s=1e-6), num_lengths=300)
    return refused.value.lowest["latency_s"]


def test_a_longer_bound_serves_no_less():
    """Throughput rises with the bound, and every bound is kept by the estimate."""
    task = lengths_of(_lengths("long answers"))
    lowest_s = _lowest_s("long answers")
    bounds = [LatencyBounds(latency_s=share * lowest_s) for share in (1.01, 2, 3, 5, 8)]
    plans = [PLANNER.plan(task, bound, num_lengths=1) for bound in bounds]
    rates = [plan.answers_per_s for plan in plans]
    assert rates == sorted(rates) and rates[-1] > 2 * rates[0]
    assert all(plan.keeps_bounds for plan in plans)
    first = LatencyBounds(first_token_s=1.1 * plans[0].first_token_s)
    assert PLANNER.plan(task, first, num_lengths=1).first_token_s <= first.first_token_s


def test_a_bound_that_no_schedule_keeps_has_a_nearest_one():
    """It has the lowest latency; other lengths change what it is expected to do."""
    task = lengths_of(_lengths("long answers"))
    lowest_s = _lowest_s("long answers")
    bounds = LatencyBounds(latency_s=lowest_s / 2)
    nearest = PLANNER.nearest(task, bounds, num_lengths=300)
    assert nearest.latency_s == pytest.approx(lowest_s) and not nearest.keeps_bounds
    assert nearest.lowest == {"latency_s": pytest.approx(lowest_s)}
    same = PLANNER.expected(nearest, task, num_lengths=300)
    assert replace(same, search_s=0.0, lowest=nearest.lowest) == replace(nearest, search_s=0.0)
    longer = lengths_of([(i, 2 * o) for i, o in _lengths("long answers")])
    assert PLANNER.expected(nearest, longer, num_lengths=300).latency_s > 1.5 * lowest_s


def test_answers_that_do_not_fit_are_refused():
    """One answer is expected to need more pages than there are."""
    planner = WAAPlanner(times=TIMES, config=lambda: replace(CONFIG, num_pages=30))
    with pytest.raises(DeviceMemoryError, match="more pages than the page pool"):
        planner.plan(lengths_of([(400, 400)]), LatencyBounds(), num_lengths=1)
