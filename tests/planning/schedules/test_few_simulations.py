"""Plans simulate few schedules, and find as good ones as all simulations would."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.planning import StepTimes
from jaxserve.planning.schedules import LatencyBounds, TaskLengths, lengths_of
from jaxserve.planning.schedules.continuous_planner import ContinuousLimits, ContinuousSpace
from jaxserve.planning.schedules.families import planner_of
from jaxserve.planning.schedules.played import Player
from jaxserve.planning.step_times import Curve
from jaxserve.scheduling.presets import PRESETS
from tests.common.tiers import some
from tests.planning.schedules.step_times import CONFIG, like_a_small_model, lowest_s

SMALL = replace(CONFIG, max_slots=8, slot_buckets=(), head_buckets=())


def _times(rng: np.random.Generator, config: EngineConfig) -> StepTimes:
    """Steps that cost most by themselves, by sequences, or by prompts."""
    base, row, token = 10 ** rng.uniform((-3, -4.3, -4.5), (-1.9, -2.7, -3.2))
    return replace(
        like_a_small_model(config),
        decode_s={
            w: Curve(((0.0, base + row * w), (1e4, base + row * w + 1e-3)))
            for w in config.slot_buckets
        },
        prefill_s={
            t: Curve(((0.0, base + token * t), (1e4, base + token * t + 1e-3)))
            for t in config.token_buckets
        },
    )


def _lengths(rng: np.random.Generator) -> TaskLengths:
    """Even ones, or ones as of chats: most are short, a few are long."""
    num = 300
    if rng.random() < 0.5:
        pairs = np.stack([rng.integers(10, 90, num), rng.integers(4, 60, num)], axis=1)
    else:
        drawn = rng.lognormal((3.5, 2.7), (0.8, 0.8), (num, 2))
        pairs = drawn.clip(1, 150)
    return lengths_of([(int(prompt), int(output)) for prompt, output in pairs])


@pytest.mark.release
@pytest.mark.parametrize("seed", some(range(6)))
def test_the_best_of_all_sizes_is_found(seed: int):
    """Random step times, lengths, memory and bounds: within 2 % of the best of all simulations.

    It takes at most 8 of them, continuous batching alone half of what all sizes would. No size does
    more than its limit.
    """
    rng = np.random.default_rng(seed)
    config = replace(SMALL, num_pages=int(rng.choice([60, 2000])))
    times, lengths = _times(rng, config), _lengths(rng)
    every = Player(times, PRESETS["auto"], lambda: config)
    space = ContinuousSpace(every, lengths)
    sizes = np.arange(1, config.max_slots + 1)
    figures = [space.of(size)[1] for size in sizes.tolist()]
    limits = ContinuousLimits(times, config, lengths).of(sizes)
    assert (limits.throughput >= [f.throughput for f in figures]).all()
    for name in ("latency_s", "first_token_s", "token_s"):
        assert (getattr(limits, name) <= [getattr(f, name) for f in figures]).all(), name
    lowest_s = min(float(f.latency_s) for f in figures)
    for share in (*rng.uniform(1.0, 3.0, 2), math.inf):
        bounds = LatencyBounds(latency_s=share * lowest_s)
        most = max(float(f.throughput) for f in figures if bounds.met(f))
        for families, most_played in ((("continuous",), 4), (("rra", "continuous"), 8)):
            player = Player(times, PRESETS["auto"], lambda: config)
            plan = planner_of(player, families).plan(lengths, bounds, num_lengths=300)
            assert plan.keeps_bounds and plan.answers_per_s >= 0.98 * most, (share, plan.name)
            assert player.num_played <= most_played, (share, families, player.num_played)


EVEN = lengths_of([(20 + i * 7 % 80, 8 + i * 11 % 112) for i in range(300)])


@pytest.fixture(scope="module")
def lowest() -> float:
    """The lowest bound for those lengths."""
    player = Player(like_a_small_model(), PRESETS["auto"], lambda: CONFIG)
    return lowest_s(planner_of(player), EVEN)


@pytest.mark.release
@pytest.mark.parametrize("share", some([1.1, 1.5, 3.0, math.inf]))
def test_an_engine_is_planned_by_few_simulated_steps(lowest: float, share: float):
    """32 slots and nothing simulated before: few steps, from a tight bound to none.

    A plan takes a second at most on a machine that simulates 2,500 steps in one.
    """
    bounds = LatencyBounds(latency_s=share * lowest)
    player = Player(like_a_small_model(), PRESETS["auto"], lambda: CONFIG)
    plan = planner_of(player).plan(EVEN, bounds, num_lengths=300)
    assert 0 < player.num_steps < 2500
    assert plan.keeps_bounds
