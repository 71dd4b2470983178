"""The frontier has the best schedule of every bound, and few bounds where it is flat."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.core.errors import InfeasibleBoundError, InvalidConfigError
from jaxserve.planning.schedules import (
    Deployment,
    LatencyBounds,
    LengthDistribution,
    TaskLengths,
    lengths_of,
    timelines_of,
)
from jaxserve.planning.schedules.frontier import (
    ClusterSearch,
    FamiliesSearch,
    frontier_of,
    neighbours_of,
)
from jaxserve.planning.schedules.search import search, throughput_under
from tests.common.tiers import some
from tests.planning.schedules.made_up import (
    MadeUpCost,
    cluster_of,
    enumerate_all,
    model_of,
    random_case,
)
from tests.planning.step_times import CONFIG, made_up


def _roomy() -> tuple[Deployment, TaskLengths]:
    """Four layers on four devices with ample memory, for batches of up to 30."""
    deployment = Deployment(
        model=model_of(4), cluster=cluster_of(4), cost=MadeUpCost(), max_encode_batch=30
    )
    lengths = TaskLengths(
        LengthDistribution.of_samples([3, 5, 9]), LengthDistribution.of_samples([2, 8, 30])
    )
    return deployment, lengths


@pytest.mark.parametrize("seed", some((0, 1, 3, 4, 6, 7)))  # something fits in memory
def test_every_point_is_the_best_of_its_bound(seed):
    """An enumeration of all schedules finds no more throughput at any bound of the frontier."""
    deployment, lengths = random_case(np.random.default_rng(seed))
    schedules = ClusterSearch(deployment, lengths)
    frontier = frontier_of(schedules, num_bounds=7)
    timelines = timelines_of(deployment, lengths)
    for bound_s, outcome in frontier.points:
        score = throughput_under(LatencyBounds(latency_s=bound_s))
        most = enumerate_all(timelines, score).score
        assert outcome.estimates.throughput == pytest.approx(most), (seed, bound_s)
        assert outcome.estimates.latency_s <= bound_s
    most = enumerate_all(timelines, throughput_under(LatencyBounds())).score
    assert frontier.points[-1][1].estimates.throughput == pytest.approx(most)
    bounds, answers = zip(
        *((b, float(o.estimates.throughput)) for b, o in frontier.points), strict=True
    )
    assert list(bounds) == sorted(bounds) and list(answers) == sorted(answers)
    assert len(frontier.points) <= 7
    below = LatencyBounds(latency_s=frontier.lowest_s * 0.999)
    with pytest.raises(InfeasibleBoundError):
        schedules.best(below)


@pytest.mark.release
def test_asked_bounds_are_points_and_the_largest_gap_is_halved():
    """A bound that is asked for is searched; more bounds leave less area where nothing is known."""
    deployment, lengths = _roomy()
    schedules = ClusterSearch(deployment, lengths)
    coarse, fine = (frontier_of(schedules, num_bounds=num) for num in (3, 12))
    assert len(coarse.points) <= 3 < len(fine.points)
    between = math.sqrt(coarse.points[0][0] * coarse.points[-1][0])
    asked = frontier_of(schedules, num_bounds=2, asked=[between, math.inf])
    best = search(deployment, lengths, LatencyBounds(latency_s=between))
    assert best.schedule in [outcome.schedule for _, outcome in asked.points]
    with pytest.raises(InfeasibleBoundError):
        frontier_of(schedules, asked=[coarse.lowest_s / 2])
    with pytest.raises(InvalidConfigError, match="num_bounds=1"):
        frontier_of(schedules, num_bounds=1)


@pytest.mark.release
def test_other_bounds_hold_along_the_whole_frontier():
    """Schedules that keep a bound of another kind are the only ones on the frontier."""
    deployment, lengths = _roomy()
    schedules = ClusterSearch(deployment, lengths)
    free = frontier_of(schedules)
    worst = max(float(outcome.estimates.first_token_s) for _, outcome in free.points)
    kept = frontier_of(schedules, bounds=LatencyBounds(first_token_s=0.7 * worst))
    assert all(o.estimates.first_token_s <= 0.7 * worst for _, o in kept.points)


@pytest.mark.parametrize(
    ("families", "controls", "is_decoder_only"),
    some(
        [
            (("rra", "waa"), {"N_D", "B_m"}, True),
            (("continuous",), {"B"}, True),
            (("continuous",), {"B"}, False),
        ]
    ),
)
def test_neighbours_differ_in_one_step(
    families: tuple[str, ...], controls: set[str], is_decoder_only: bool
):
    """Each neighbour has its own estimates, and those beyond the limits are left out."""
    deployment, lengths = _roomy()
    model = replace(deployment.model, is_decoder_only=is_decoder_only)
    deployment = replace(deployment, model=model)
    schedules = ClusterSearch(deployment, lengths, families)
    for _, outcome in frontier_of(schedules, num_bounds=6).points:
        own = outcome.schedule.encode_batch, outcome.control
        control = outcome.control_name
        for name, other in neighbours_of(schedules, outcome).items():
            step = 1 if "+" in name else -1
            changed = (step, 0) if name.startswith("B_E") else (0, step)
            sign = "+" if step > 0 else "-"
            assert name in (f"B_E {sign} 1", f"{control} {sign} 1")
            assert (other.schedule.encode_batch - own[0], other.control - own[1]) == changed
            assert other.schedule.layout == outcome.schedule.layout
        assert control in controls
        assert ("B_E - 1" in neighbours_of(schedules, outcome)) == (own[0] > 1)
        same = schedules.estimated(outcome.schedule, *own)
        assert same is not None
        assert same.estimates.latency_s == outcome.estimates.latency_s


def test_lengths_beyond_an_engines_context_are_refused():
    """An engine whose context is too short is told so before anything is searched."""
    lengths = TaskLengths(LengthDistribution.of_samples([200]), LengthDistribution.of_samples([57]))
    with pytest.raises(InvalidConfigError, match="do not fit in a context of 256"):
        FamiliesSearch(made_up(), CONFIG, lengths)
    pairs = [(200, 5), (20, 57)]  # no prompt of 200 tokens has an answer of 57
    assert FamiliesSearch(made_up(), CONFIG, lengths_of(pairs)).lengths.inputs.max_length == 200
    with pytest.raises(InvalidConfigError, match="up to 257 prompt and output tokens together"):
        lengths_of([(200, 57)]).check_fits(CONFIG)


def test_prompts_that_an_encoder_refuses_are_not_planned_for():
    """A step is shorter than the longest prompt, which an encoder computes whole."""
    lengths, most = lengths_of([(150, 5)]), CONFIG.max_step_tokens
    assert most < 150 < CONFIG.max_prompt_tokens
    lengths.check_fits(CONFIG)
    with pytest.raises(InvalidConfigError, match=f"encoder takes {most} in a step"):
        lengths.check_fits(replace(CONFIG, has_encoder=True))
