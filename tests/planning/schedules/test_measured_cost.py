"""Plans from measured step times, against those times and against the real scheduler."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TypeAlias

import numpy as np
import pytest

from jaxserve.core.errors import DeviceMemoryError, InfeasibleBoundError, InvalidConfigError
from jaxserve.planning.schedules import (
    LatencyBounds,
    LengthDistribution,
    Points,
    RRAPlanner,
    RRATimeline,
    SchedulePlan,
    TaskLengths,
    lengths_of,
)
from jaxserve.planning.schedules.layer_cost import LayerPhase
from jaxserve.planning.schedules.measured_cost import MeasuredCost, measured_deployment
from jaxserve.planning.step_times import Curve
from jaxserve.scheduling.iteration.rra import RRA
from tests.common.tiers import some
from tests.planning.schedules.step_times import (
    CONFIG,
    like_a_small_model,
    plan_rra,
    rate,
    served,
    spent_s,
)

Lengths: TypeAlias = Sequence[tuple[int, int]]


def _lengths(num: int, seed: int) -> tuple[tuple[int, int], ...]:
    rng = random.Random(seed)
    return tuple((rng.randint(20, 100), rng.randint(8, 120)) for _ in range(num))


def test_an_iteration_costs_what_was_measured():
    """A batch in the middle of a compiled size costs this size, with its share of a loop."""
    times = like_a_small_model()
    cost = MeasuredCost(times=times, input_tokens=60.0, num_iterations=1e6, num_decodes=12)
    size = 16
    assert size in CONFIG.slot_buckets and size // 2 < 12
    rest_s = cost.rest_s(LayerPhase.DECODE, np.array([12.0]), 1)[0]
    attention_s = cost.attention_s(LayerPhase.DECODE, np.array([12.0]), 100.0, 1)[0]
    loops = 2 * (times.loop_s[size] + times.edit_s) / 12
    assert rest_s + attention_s == pytest.approx(times.decode_s[size](1200) + loops)
    assert attention_s == pytest.approx(times.decode_s[size](1200) - times.decode_s[size](0))


def test_an_encode_phase_costs_what_was_measured():
    """Three prompts of 60 tokens: one step of the largest size, one admission call, the host."""
    times = like_a_small_model()
    cost = MeasuredCost(times=times, input_tokens=60.0, num_iterations=1e6, num_decodes=8)
    rest_s = cost.rest_s(LayerPhase.ENCODE, np.array([180.0]), 1)[0]
    attention_s = cost.attention_s(LayerPhase.ENCODE, np.array([3.0]), 60.0, 1)[0]
    positions = 3 * 60 * 61 / 2
    expected_s = times.prefill_s[256](positions) + times.head_s[CONFIG.head_buckets[0]]
    expected_s += times.edit_s + times.admit_s + times.plan_s + times.submit_s
    assert rest_s + attention_s == pytest.approx(expected_s)


@pytest.mark.parametrize("seed", [0, 1])
def test_costs_rise_with_batch_and_positions_although_measurements_do_not(seed: int):
    """Noisy tables: a larger batch or a longer context never costs less.

    Costs within a range of N_D are lower limits of those of each N_D.
    """
    rng = random.Random(seed)

    def noisy(at: float) -> Curve:
        return Curve(tuple((x, at * rng.uniform(0.5, 1.5)) for x in (0.0, 500.0, 4000.0)))

    times = replace(
        like_a_small_model(),
        decode_s={w: noisy(1e-3) for w in CONFIG.slot_buckets},
        loop_s={w: rng.uniform(0, 1e-3) for w in CONFIG.slot_buckets},
        prefill_s={t: noisy(1e-2) for t in CONFIG.token_buckets},
    )
    within = MeasuredCost(
        times=times, input_tokens=50.0, num_iterations=60.0, num_decodes=3, most_decodes=30
    )
    for num_decodes in range(3, 31):
        cost = replace(within, num_decodes=num_decodes, most_decodes=None)
        _assert_rises(cost)
        for batch in (1.0, 7.5, 30.0):
            least_s = within.rest_s(LayerPhase.DECODE, np.array([batch]), 1)
            least_s = least_s + within.attention_s(LayerPhase.DECODE, np.array([batch]), 40.0, 1)
            exact_s = cost.rest_s(LayerPhase.DECODE, np.array([batch]), 1)
            exact_s = exact_s + cost.attention_s(LayerPhase.DECODE, np.array([batch]), 40.0, 1)
            assert (least_s <= exact_s * (1 + 1e-9)).all(), (num_decodes, batch)
    _assert_rises(within)


def _assert_rises(cost: MeasuredCost) -> None:
    batch = np.linspace(0.1, 40, 200)
    for length in (1.0, 100.0, 1000.0):
        total = cost.rest_s(LayerPhase.DECODE, batch, 1)
        total = total + cost.attention_s(LayerPhase.DECODE, batch, length, 1)
        assert (np.diff(total) >= -1e-12).all()
    lengths = np.linspace(1, 1000, 100)
    assert (
        np.diff(cost.attention_s(LayerPhase.DECODE, np.full(100, 7.0), lengths, 1)) >= -1e-12
    ).all()


@pytest.mark.parametrize(
    ("encode_batch", "num_decodes"),
    some([(2, 6), (2, 8), (4, 16), (4, 24), (8, 32), (3, 20), (6, 64)], 2),
)
def test_throughput_is_that_of_the_real_scheduler(encode_batch: int, num_decodes: int):
    """Within 10 % of the simulation with the same step times and shape, whatever the shape."""
    lengths = _lengths(600, seed=3)
    inputs, outputs = zip(*lengths, strict=True)
    task = TaskLengths(
        LengthDistribution.of_samples(inputs), LengthDistribution.of_samples(outputs)
    )
    deployment = measured_deployment(
        like_a_small_model(), CONFIG, task.inputs.mean, task.outputs.mean - 1
    )
    timeline = RRATimeline(deployment, task)
    point = Points.one(0, encode_batch, num_decodes)
    figures, schedule = timeline.estimate(point)[0], timeline.schedule(point)
    assert figures.fits
    iteration = RRA(
        encode_batch=encode_batch,
        decode_iterations=num_decodes,
        encode_tokens=schedule.encode_tokens,
        decode_batch=schedule.decode_batch,
    )
    throughput = rate(served(lengths, iteration, like_a_small_model()))
    assert float(figures.throughput) == pytest.approx(throughput, rel=0.1)


@pytest.mark.release
@pytest.mark.parametrize("share", some([1.05, 1.5, math.inf]))
def test_a_plan_of_an_encoder_decoder_model_keeps_its_bound(share: float):
    """As of other models: throughput within 10 %, and 99 % of answers in time."""
    config, lengths = replace(CONFIG, has_encoder=True), _lengths(600, seed=5)
    times = like_a_small_model(config)
    with pytest.raises(InfeasibleBoundError) as refused:
        plan_rra(times, config, lengths, 1e-6)
    bound_s = share * refused.value.lowest["latency_s"]
    plan = plan_rra(times, config, lengths, bound_s)
    timings = served(lengths, plan.iteration(), times, config)
    assert plan.answers_per_s == pytest.approx(rate(timings), rel=0.1)
    assert np.mean(spent_s(timings) <= bound_s) >= 0.99


@pytest.mark.release
@pytest.mark.parametrize("share", some([1.05, 1.5, 4.0, math.inf]))
def test_a_plan_keeps_its_bound_in_the_simulation(share: float):
    """From just above the lowest bound to none: throughput within 10 %, 99 % of answers in time."""
    lengths = _lengths(600, seed=5)
    bound_s = share * _lowest_s(lengths)
    plan = _plan(lengths, bound_s)
    assert plan.latency_s <= bound_s
    timings = served(lengths, plan.iteration(), like_a_small_model())
    assert plan.answers_per_s == pytest.approx(rate(timings), rel=0.1)
    assert np.mean(spent_s(timings) <= bound_s) >= 0.99


@pytest.mark.release
@pytest.mark.parametrize(
    ("kind", "share"), some([("first_token", 1.1), ("token", 1.05), ("token", 1.4)])
)
def test_a_bound_on_tokens_is_kept_in_the_simulation(kind: str, share: float):
    """Time to first token, or per token: in 99 % of answers, at some cost in throughput."""
    lengths = _lengths(600, seed=5)
    free, name = _free_plan(lengths), f"{kind}_s"
    bound_s = share * _lowest_on_tokens_s(lengths, kind)
    plan = plan_rra(like_a_small_model(), CONFIG, lengths, math.inf, **{f"{kind}_bound_s": bound_s})
    assert getattr(plan, name) <= bound_s < getattr(free, name)
    assert plan.keeps_bounds and plan.answers_per_s < free.answers_per_s
    timings = served(lengths, plan.iteration(), like_a_small_model())
    spent = {
        "first_token": [(t.first_token_s or 0) - (t.admitted_s or 0) for t in timings],
        # Long answers, whose mean per token the bound is for.
        "token": [
            ((t.finished_s or 0) - (t.first_token_s or 0)) / (num_output - 1)
            for t, (_, num_output) in zip(timings, lengths, strict=True)
            if num_output >= 100
        ],
    }[kind]
    assert np.mean(np.array(spent) <= bound_s) >= 0.99


def test_an_infeasible_bound_has_a_nearest_schedule():
    """It is that with the lowest latency, and says which bounds would be feasible."""
    lengths = _lengths(200, seed=5)
    lowest_s = _lowest_s(lengths)
    planner = RRAPlanner.measured(like_a_small_model(), lambda: CONFIG)
    bounds = LatencyBounds(latency_s=0.5 * lowest_s)
    plan = planner.nearest(lengths_of(lengths), bounds, num_lengths=200)
    assert plan.latency_s == pytest.approx(lowest_s, rel=0.02) and not plan.keeps_bounds
    assert plan.lowest["latency_s"] == pytest.approx(lowest_s)
    assert "no schedule keeps" in str(plan) and "no schedule keeps" in plan.summary()
    feasible = LatencyBounds(latency_s=1.2 * lowest_s)
    kept = planner.nearest(lengths_of(lengths), feasible, num_lengths=200)
    assert kept.keeps_bounds and not kept.lowest and "no schedule keeps" not in str(kept)


def test_a_plan_is_expected_to_do_other_things_with_other_lengths():
    """Longer answers take longer under the same schedule; equal lengths change nothing."""
    lengths = _lengths(200, seed=5)
    planner = RRAPlanner.measured(like_a_small_model(), lambda: CONFIG)
    plan = _plan(lengths, 1.5 * _lowest_s(lengths))
    same = planner.expected(plan, lengths_of(lengths), num_lengths=200)
    assert replace(same, search_s=plan.search_s) == plan
    longer = [(p, 2 * o) for p, o in lengths]
    changed = planner.expected(plan, lengths_of(longer), num_lengths=200)
    assert changed.schedule.num_decodes == plan.schedule.num_decodes
    assert changed.latency_s > 1.5 * plan.latency_s and not changed.keeps_bounds
    shorter = planner.expected(plan, lengths_of([(30, 2)]), num_lengths=1)
    assert shorter.latency_s < plan.latency_s


def test_a_longer_bound_serves_no_less():
    """The throughput of plans rises with the bound, and the text names the figures."""
    lengths = _lengths(200, seed=5)
    lowest_s = _lowest_s(lengths)
    plans = [_plan(lengths, share * lowest_s) for share in (1.05, 1.5, 3.0, math.inf)]
    throughputs = [plan.answers_per_s for plan in plans]
    assert throughputs[-1] > 1.2 * throughputs[0]
    assert all(b >= 0.98 * a for a, b in zip(throughputs, throughputs[1:], strict=False))
    text = str(plans[0])
    assert f"encode {plans[0].schedule.encode_batch} sequences" in text
    assert f"{plans[0].answers_per_s:.4g} answers/s" in text and "200 answers" in text


def test_what_cannot_be_planned_is_refused():
    """A bound that is too short, a pool that is too small, and lengths that are not allowed."""
    lengths = _lengths(50, seed=1)
    with pytest.raises(InfeasibleBoundError) as refused:
        _plan(lengths, 1e-3)
    lowest_s = refused.value.lowest["latency_s"]
    assert _plan(lengths, 1.001 * lowest_s).latency_s <= 1.001 * lowest_s
    with pytest.raises(DeviceMemoryError, match="page pool"):
        plan_rra(like_a_small_model(), replace(CONFIG, num_pages=3), [(400, 100)], math.inf)
    for wrong in ([], [(0, 5)], [(5, 0)]):
        with pytest.raises(InvalidConfigError, match=r"lengths=\[.*\] is not allowed"):
            _plan(wrong, 1.0)
    with pytest.raises(InvalidConfigError, match="latency_s=0"):
        _plan(lengths, 0)


def test_an_engine_with_one_slot_has_a_plan():
    """One sequence runs at a time."""
    config = replace(CONFIG, max_slots=1, slot_buckets=(), head_buckets=())
    plan = plan_rra(like_a_small_model(config), config, _lengths(50, seed=1), math.inf)
    assert plan.schedule.encode_batch == 1 and plan.schedule.decode_batch <= 1.1


def test_answers_of_one_token_need_no_decode_phase():
    """All answers end with their first token, so the plan only encodes."""
    plan = _plan([(30, 1)] * 5, math.inf)
    assert plan.schedule.decode_batch == 0 and plan.iteration().decode_batch is None
    assert plan.answers_per_s > 0


def _plan(lengths: Lengths, bound_s: float) -> SchedulePlan:
    return plan_rra(like_a_small_model(), CONFIG, lengths, bound_s)


@cache
def _free_plan(lengths: Lengths) -> SchedulePlan:
    return _plan(lengths, math.inf)


@cache
def _lowest_on_tokens_s(lengths: Lengths, kind: str) -> float:
    with pytest.raises(InfeasibleBoundError) as refused:
        plan_rra(like_a_small_model(), CONFIG, lengths, math.inf, **{f"{kind}_bound_s": 1e-6})
    return refused.value.lowest[f"{kind}_s"]


@cache
def _lowest_s(lengths: Lengths) -> float:
    with pytest.raises(InfeasibleBoundError) as refused:
        _plan(lengths, 1e-6)
    return refused.value.lowest["latency_s"]
