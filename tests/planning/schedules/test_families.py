"""Plans of several families: the best of all of them, on one scale, kept in other simulations."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import DeviceMemoryError, InfeasibleBoundError, InvalidConfigError
from jaxserve.core.request import Timing
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.planning import simulate
from jaxserve.planning.schedules import LatencyBounds, SchedulePlan, lengths_of
from jaxserve.planning.schedules.adaptation import Adaptation, AdaptingPilot
from jaxserve.planning.schedules.families import FamiliesPlanner, planner_of
from jaxserve.planning.schedules.frontier import FamiliesSearch, frontier_of, neighbours_of
from jaxserve.planning.schedules.observed import AnswerLength, RequestClass
from jaxserve.planning.schedules.plan import CLOSED_FORM, SIMULATED
from jaxserve.planning.schedules.played import LONGER, Player
from jaxserve.planning.schedules.search import throughput_under
from jaxserve.scheduling.iteration.continuous import Unified
from jaxserve.scheduling.iteration.rra import RRA
from jaxserve.scheduling.presets import PRESETS
from jaxserve.workload import WorkloadItem
from tests.common.tiers import some
from tests.planning.schedules.step_times import CONFIG, like_a_small_model, lowest_s, spent_s

TIMES = like_a_small_model()
SMALL = replace(CONFIG, max_slots=12, slot_buckets=(), head_buckets=())


def _planner(config: EngineConfig = CONFIG, policy: str = "auto") -> FamiliesPlanner:
    times = like_a_small_model(config)
    planner = planner_of(Player(times, PRESETS[policy], lambda: config))
    assert isinstance(planner, FamiliesPlanner)
    return planner


def _pairs(seed: int, num: int = 300, longest: int = 120) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    return [(rng.randint(20, 100), rng.randint(8, longest)) for _ in range(num)]


def _heavy(seed: int, num: int = 300) -> list[tuple[int, int]]:
    """Lengths as of chats: most are short, a few are long."""
    rng = np.random.default_rng(seed)
    prompts, outputs = rng.lognormal(3.5, 0.8, num), rng.lognormal(3.3, 0.9, num)
    return [
        (int(p), int(o)) for p, o in zip(prompts.clip(1, 200), outputs.clip(1, 250), strict=True)
    ]


def _timings(
    pairs: list[tuple[int, int]], plan: SchedulePlan, config: EngineConfig = CONFIG
) -> list[Timing]:
    items = [WorkloadItem(prompt_token_ids=(1,) * p, num_output_tokens=o) for p, o in pairs]
    policy = replace(PRESETS["vllm_like"], iteration=plan.iteration())
    run = simulate(items, policy, config, like_a_small_model(config), progress=False)
    assert [len(c.token_ids) for c in run.completions] == [o for _, o in pairs]
    return [completion.timing for completion in run.completions]


DRAWN = {"uniform": _pairs, "chats": _heavy}
PLANNERS = {name: (_planner(SMALL), lengths_of(draw(0))) for name, draw in DRAWN.items()}
# Plans of more slots, for more lengths.
LARGER = {name: (_planner(), lengths_of(draw(0, 2000))) for name, draw in DRAWN.items()}


@cache
def _lowest_s(name: str, *, is_larger: bool = False) -> float:
    """Return the lowest bound on latency that one of the `PLANNERS` or `LARGER` ones keeps."""
    planner, lengths = (LARGER if is_larger else PLANNERS)[name]
    return lowest_s(planner, lengths)


@pytest.mark.release
@pytest.mark.parametrize("name", some(PLANNERS))
def test_no_schedule_serves_more_under_any_bound(name: str):
    """From the lowest bound to none: the plan is at least as good as every limit and the best RRA.

    Latency rises from limit to limit by little, so that what is simulated may be out of order by
    1 %; so much less is allowed.
    """
    planner, lengths = PLANNERS[name]
    limits = planner.continuous.space(lengths, ())
    each = [limits.of(size)[1] for size in range(1, SMALL.max_slots + 1)]
    lowest = _lowest_s(name)
    families = set()
    for share in (1.0001, 1.1, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, math.inf):
        bounds = LatencyBounds(latency_s=share * lowest)
        plan = planner.plan(lengths, bounds, num_lengths=300)
        assert plan.keeps_bounds and plan.latency_s <= bounds.latency_s
        kept = [float(one.throughput) for one in each if bounds.met(one)]
        try:
            rra = planner.rra.plan(lengths, bounds, num_lengths=300)
            expected = planner.expected(rra, lengths, num_lengths=300)
            kept += [expected.answers_per_s] * expected.keeps_bounds
        except InfeasibleBoundError:
            pass
        assert plan.answers_per_s >= 0.99 * max(kept, default=0.0), (share, plan.name)
        families.add(plan.family)
    assert "continuous" in families


@pytest.mark.release
@pytest.mark.parametrize("name", some(["first_token_s", "token_s"]))
def test_bounds_on_tokens_are_searched_too(name: str):
    """Half way between the lowest and that of the plan without bounds; the lowest is feasible."""
    planner, lengths = PLANNERS["uniform"]
    free = planner.plan(lengths, LatencyBounds(), num_lengths=300)
    lowest = lowest_s(planner, lengths, name)
    for bound_s in (1.0001 * lowest, (lowest + getattr(free, name)) / 2):
        plan = planner.plan(lengths, LatencyBounds(**{name: bound_s}), num_lengths=300)
        assert getattr(plan, name) <= bound_s and plan.answers_per_s <= 1.01 * free.answers_per_s


@pytest.mark.release
@pytest.mark.parametrize("name", some(LARGER))
@pytest.mark.parametrize("share", some([1.5, 3.0, math.inf]))
def test_a_plan_is_as_good_as_it_says(name: str, share: float):
    """Lengths of other seeds: 98 % of the answers keep the bound, and throughput is within 10 %."""
    draw, (planner, lengths) = DRAWN[name], LARGER[name]
    bound_s = share * _lowest_s(name, is_larger=True)
    plan = planner.plan(lengths, LatencyBounds(latency_s=bound_s), num_lengths=2000)
    for seed in (1, 2):
        times = _timings(draw(seed, 500), plan)
        assert np.mean(spent_s(times) <= bound_s) >= 0.98
        assert plan.tokens_per_s == pytest.approx(_tokens_per_s(draw(seed, 500), times), rel=0.1)


def _tokens_per_s(pairs: list[tuple[int, int]], timings: list[Timing]) -> float:
    """Return output tokens per second between the ends of the 100th and of the 400th answer."""
    ends = np.sort([t.finished_s or 0.0 for t in timings])
    begins_s, ends_s = (
        np.array([getattr(t, name) or 0.0 for t in timings])
        for name in ("first_token_s", "finished_s")
    )
    inside_s = np.minimum(ends_s, ends[400]) - np.maximum(begins_s, ends[100])
    shares = np.maximum(0.0, inside_s) / np.maximum(1e-9, ends_s - begins_s)
    return float(shares @ np.array([o for _, o in pairs])) / (ends[400] - ends[100])


@pytest.mark.release
@pytest.mark.parametrize("size", some(SMALL.slot_buckets, 1))
def test_no_static_batch_keeps_a_bound_that_plans_do_not(size: int):
    """Under its p99 with the margin of plans, and a twentieth more, a plan is found.

    It serves at least 0.95 times as much.
    """
    planner, lengths = PLANNERS["uniform"]
    buckets = tuple(each for each in SMALL.slot_buckets if each <= size)
    config = replace(SMALL, max_slots=size, slot_buckets=buckets, head_buckets=())
    items = [WorkloadItem(prompt_token_ids=(1,) * p, num_output_tokens=o) for p, o in _pairs(0)]
    times = like_a_small_model(config)
    run = simulate(items, PRESETS["fastertransformer"], config, times, progress=False)
    spent = spent_s([c.timing for c in run.completions])
    bounds = LatencyBounds(latency_s=1.05 * LONGER * float(np.quantile(spent, 0.99)))
    plan = planner.plan(lengths, bounds, num_lengths=300)
    assert plan.keeps_bounds and plan.answers_per_s >= 0.95 * len(items) / run.wall_s


@pytest.mark.release
@pytest.mark.parametrize("name", some(PLANNERS))
def test_batches_that_run_until_all_have_ended_are_compared(name: str):
    """They may fill the slots. A plan has 0.97 of the best one that keeps the bound, or more."""
    planner, lengths = PLANNERS[name]
    space = planner.space(lengths, ())
    most = space.rra.whole(throughput_under(LatencyBounds()))
    assert most is not None and most.encode_batch == SMALL.max_slots
    every = [
        space.estimated(space.nearest(replace(most, encode_batch=size)))
        for size in range(1, SMALL.max_slots + 1)
    ]
    assert all(each.fits for each in every)
    for bound_s in (*(float(each.latency_s) for each in every), math.inf):
        bounds = LatencyBounds(latency_s=bound_s)
        kept = [float(each.throughput) for each in every if bounds.met(each)]
        plan = planner.plan(lengths, bounds, num_lengths=300)
        assert plan.keeps_bounds and plan.answers_per_s >= 0.97 * max(kept), (bound_s, plan.name)


@pytest.mark.release
def test_the_same_answers_whenever_they_are_asked_for():
    """A second search simulates nothing; figures say what they are estimated by."""
    planner, lengths = PLANNERS["uniform"]
    bounds = LatencyBounds(latency_s=1.2 * _lowest_s("uniform"))
    first = planner.plan(lengths, bounds, num_lengths=300)
    num_played = planner.continuous.player.num_played
    again = planner.plan(lengths, bounds, num_lengths=300)
    assert replace(again, search_s=first.search_s) == first
    assert planner.continuous.player.num_played == num_played
    for plan in (first, planner.plan(lengths, LatencyBounds(), num_lengths=300)):
        assert plan.estimate == SIMULATED and f"expected ({SIMULATED})" in str(plan)
        assert plan.figures()["schedule"] == plan.name and plan.family in plan.name.lower()
    alone = planner.rra.plan(lengths, bounds, num_lengths=300)
    assert alone.estimate == CLOSED_FORM and alone.name.startswith("RRA encode ")


@pytest.mark.release
def test_plans_do_not_count_on_proposals():
    """An engine that speculates has the plan of one that does not: who knows what is right."""
    speculating = _planner(replace(SMALL, num_proposed=8))
    planner, lengths = PLANNERS["chats"]
    bounds = LatencyBounds(latency_s=1.3 * _lowest_s("chats"))
    found, wanted = (
        replace(each.plan(lengths, bounds, num_lengths=300), search_s=0.0)
        for each in (speculating, planner)
    )
    assert found == wanted


@pytest.mark.release
def test_memory_limits_the_sequences_that_run():
    """A small pool: no plan preempts much, and it serves at least what each limit does."""
    config = replace(SMALL, num_pages=40)
    planner, lengths = _planner(config, "vllm_like"), lengths_of(_pairs(0))
    limits = planner.continuous.space(lengths, ())
    played = [limits.of(size) for size in range(1, config.max_slots + 1)]
    bounds = LatencyBounds(latency_s=1.02 * float(played[4][1].latency_s))
    for each in (bounds, LatencyBounds()):
        plan = planner.plan(lengths, each, num_lengths=300)
        kept = [float(one.throughput) for _, one in played if each.met(one)]
        assert plan.answers_per_s >= 0.98 * max(kept)
    with pytest.raises(DeviceMemoryError, match="page pool"):
        _planner(replace(CONFIG, num_pages=3)).plan(
            lengths_of([(400, 100)]), LatencyBounds(), num_lengths=1
        )


@pytest.mark.release
def test_answers_without_room_are_planned_as_cut():
    """Prompts fill the context, so all answers have one token; the plan is for these."""
    plan = _planner(SMALL).plan(lengths_of([(600, 50)]), LatencyBounds(), num_lengths=1)
    assert plan.answers_per_s > 0 and math.isfinite(plan.latency_s)


@pytest.mark.release
def test_requests_with_bounds_of_their_own_get_the_better_family():
    """From the lowest bound of the class to none, both families are offered with reserved slots.

    The plan is at least as good as each family alone.
    """
    planner, lengths = PLANNERS["uniform"]
    each = RequestClass(bounds=LatencyBounds(latency_s=1e-6), max_answer_tokens=30, num_running=2)
    with pytest.raises(InfeasibleBoundError) as refused:
        planner.plan(lengths, LatencyBounds(), num_lengths=300, classes=[each])
    [lowest_s] = refused.value.lowest.values()
    families = set()
    for share in (1.0001, 1.2, 1.5, 2.0, 3.0, 9.0):
        tight = [replace(each, bounds=LatencyBounds(latency_s=share * lowest_s))]
        plan = planner.plan(lengths, LatencyBounds(), num_lengths=300, classes=tight)
        assert plan.keeps_bounds and plan.reserved_slots == 2
        assert plan.iteration().reserved_slots == 2
        for one in (planner.rra, planner.continuous):
            try:
                alone = one.plan(lengths, LatencyBounds(), num_lengths=300, classes=tight)
            except InfeasibleBoundError:
                continue
            present = planner.expected(alone, lengths, num_lengths=300, classes=tight)
            assert present.keeps_bounds and plan.answers_per_s >= 0.99 * present.answers_per_s
            families.add(alone.family)
        assert isinstance(plan.iteration(), Unified if plan.family == "continuous" else RRA)
    assert families == {"rra", "continuous"}


@pytest.mark.release
def test_reserved_slots_are_beside_the_limit():
    """Limit and reserve fit into the slots, and a bound that no limit keeps is found missed."""
    planner, lengths = PLANNERS["uniform"]
    each = RequestClass(bounds=LatencyBounds(latency_s=1e3), max_answer_tokens=30, num_running=4)
    space = planner.continuous.space(lengths, [each])
    best = space.best(throughput_under(LatencyBounds()))
    assert best is not None and 1 <= best.max_running <= SMALL.max_slots - 4
    free = planner.continuous.plan(lengths, LatencyBounds(), num_lengths=300)
    assert space.nearest(free.schedule).max_running <= SMALL.max_slots - 4
    own = [space.own_latencies_s(space.of(size)[0])[0] for size in (1, 4, 8)]
    assert own == sorted(own) and own[0] > 0
    tight = planner.continuous.space(
        lengths, [replace(each, bounds=LatencyBounds(latency_s=0.9 * own[0]))]
    )
    assert tight.best(throughput_under(LatencyBounds())) is None


def test_families_are_checked():
    """An unknown one, none, and a string are refused; one alone has a planner of its own."""
    player = Player(TIMES, PRESETS["auto"], lambda: CONFIG)
    for wrong in ((), ("rra", "waa"), "rra"):
        with pytest.raises(InvalidConfigError, match="policies="):
            planner_of(player, wrong)
    for family in ("continuous", "rra"):
        only = planner_of(player, (family,))
        plan = only.plan(lengths_of(_pairs(0)), LatencyBounds(), num_lengths=300)
        assert (plan.family, plan.estimate) == (family, SIMULATED)


@pytest.mark.release
def test_families_replace_each_other_while_requests_run():
    """RRA begins, answers become longer and a class of bounds appears: nothing is lost."""
    planner = _planner()
    rng = random.Random(4)
    lengths = [(rng.randint(20, 60), rng.randint(8, 40 if i < 300 else 90)) for i in range(600)]
    known = [
        AnswerLength(admitted_s=-math.inf, num_prompt=p, num_output=o) for p, o in lengths[:300]
    ]
    task = lengths_of(lengths[:300])
    bounds = LatencyBounds(latency_s=4.5)
    plan = planner.rra.plan(task, bounds, num_lengths=300)
    pilot = AdaptingPilot(Adaptation(planner, bounds, plan=plan, answers=known))
    items = [
        WorkloadItem(
            prompt_token_ids=(1,) * p,
            num_output_tokens=o,
            max_tokens=o,
            sampling=SamplingParams(latency_bound=250.0 if 350 < i < 450 else None),
        )
        for i, (p, o) in enumerate(lengths)
    ]
    policy = replace(PRESETS["auto"], iteration=plan.iteration())
    run = simulate(items, policy, CONFIG, TIMES, pilot=pilot, progress=False)
    assert [len(c.token_ids) for c in run.completions] == [o for _, o in lengths]
    families = [plan.family, *(each.family for _, each in pilot.adopted)]
    assert {"rra", "continuous"} <= set(families), families
    assert any(each.reserved_slots for _, each in pilot.adopted)


@pytest.mark.release
def test_the_frontier_has_both_families():
    """It rises with the bound; neighbours of a limit are the limits beside it."""
    pairs = _pairs(0)
    schedules = FamiliesSearch(like_a_small_model(SMALL), SMALL, lengths_of(pairs))
    frontier = frontier_of(schedules, num_bounds=6)
    rates = [float(outcome.estimates.throughput) for _, outcome in frontier.points]
    assert rates == sorted(rates) and frontier.lowest_s > 0 and len(frontier.drawn)
    _, most = frontier.points[-1]
    planner, lengths = PLANNERS["uniform"]
    assert rates[-1] == planner.plan(lengths, LatencyBounds(), num_lengths=300).answers_per_s
    beside = neighbours_of(schedules, most)
    if most.policy.value == "continuous":
        assert set(beside) <= {"B - 1", "B + 1"} and most.control_name == "B"
    figures = most.figures()
    assert (
        figures["policy"] in ("rra", "continuous")
        and figures["max_running"] == most.schedule.max_running
    )
