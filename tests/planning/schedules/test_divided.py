"""Which division of the devices a plan chooses, against all of them and against simulations."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InfeasibleBoundError
from jaxserve.planning import GroupTimes, StepTimes
from jaxserve.planning.schedules import LatencyBounds, lengths_of
from jaxserve.planning.schedules.adaptation import Adaptation
from jaxserve.planning.schedules.divided import DividedPlanner, DivisionOption, DivisionRule
from jaxserve.planning.schedules.measured_waa import WAAPlanner
from jaxserve.planning.schedules.observed import AnswerLength
from jaxserve.planning.schedules.plan import SchedulePlan
from jaxserve.planning.schedules.schedule import AllocationPolicy, Division
from jaxserve.planning.step_times import GroupSizes, derived
from tests.planning.schedules.step_times import like_a_small_model, rate, served

SMALL = EngineConfig(
    page_size=16,
    num_pages=800,
    max_slots=12,
    max_context=512,
    max_step_tokens=256,
    max_decode_iterations=4,
)
DIVISIONS = [Division(e, d) for e in (1, 2, 4) for d in (1, 2, 4) if e + d <= 5]
LONG_ANSWERS = [(20, 40)] * 20
LONG_PROMPTS = [(300, 4)] * 20


def _of_size(size: int, parallel: float = 0.9) -> StepTimes:
    """Return times of a group of `size` devices, by Amdahl's law."""
    times = like_a_small_model(SMALL)
    times = replace(times, origin=replace(times.origin, device={"count": 1}))
    law = derived(times, size)
    factor = (1 - parallel) + parallel / size
    return replace(
        law,
        **{
            name: {
                key: replace(curve, points=tuple((x, factor * s) for x, s in curve.points))
                for key, curve in getattr(times, name).items()
            }
            for name in ("decode_s", "prefill_s")
        },
    )


def _times(encode: int, decode: int, parallel: float = 0.9) -> GroupTimes:
    groups = (_of_size(encode, parallel), _of_size(decode, parallel))
    return GroupTimes(groups=groups, handover_s=1e-3, page_s=1e-4)


def _options(present: Division, **settings: object) -> list[DivisionOption]:
    ordered = sorted(DIVISIONS, key=lambda each: each != present)
    return [
        DivisionOption(
            division=each,
            times=_times(each.encode, each.decode),
            num_pages=SMALL.num_pages,
            **(settings if each != present else {}),
        )
        for each in ordered
    ]


def _planner(options: Sequence[DivisionOption], max_pause_s: float = 1.0) -> DividedPlanner:
    return DividedPlanner(
        options=lambda: options, config=lambda: SMALL, num_moves=lambda: 0, max_pause_s=max_pause_s
    )


def _plan(planner: DividedPlanner, lengths: list[tuple[int, int]], bound_s: float = math.inf):
    task = lengths_of(lengths)
    return planner.plan(task, LatencyBounds(latency_s=bound_s), num_lengths=len(lengths))


def _rates(lengths: list[tuple[int, int]], bound_s: float = math.inf) -> dict[Division, float]:
    """Return the best throughput of each division, each found by itself."""
    rates = {}
    for each in DIVISIONS:
        planner = WAAPlanner(times=_times(each.encode, each.decode), config=lambda: SMALL)
        try:
            plan = planner.plan(
                lengths_of(lengths), LatencyBounds(latency_s=bound_s), num_lengths=1
            )
        except InfeasibleBoundError:
            continue
        rates[each] = plan.answers_per_s
    return rates


def test_the_division_that_serves_the_most_is_chosen():
    """Of all divisions, whatever the present one, the lengths and the bound; or the present one."""
    rng = random.Random(5)
    moved = 0
    for _ in range(6):
        lengths = [(rng.choice([10, 60, 250]), rng.choice([4, 20, 60])) for _ in range(4)]
        bound_s = rng.choice([math.inf, 0.8, 0.4])
        rates = _rates(lengths, bound_s)
        if not rates:
            continue
        present = rng.choice(DIVISIONS)
        plan = _plan(_planner(_options(present, pause_s=0.01)), lengths, bound_s)
        best = max(rates, key=lambda each: rates[each])
        if plan.schedule.division == present:
            assert plan.answers_per_s == rates[present] >= max(rates.values()) / 1.12
            assert plan.move is None or "times as good" in plan.move.refused
        else:
            moved += 1
            assert plan.schedule.division == best and plan.answers_per_s == rates[best]
            assert plan.move is not None and plan.move.division == best and not plan.move.refused
            assert f"devices move from {present} to {best}" in str(plan)
    assert moved > 1


@pytest.mark.release
@pytest.mark.parametrize("lengths", [LONG_ANSWERS, LONG_PROMPTS], ids=["answers", "prompts"])
def test_the_discrete_simulation_agrees(lengths: list[tuple[int, int]]):
    """The real scheduler serves more on the chosen division than on the one before."""
    present = Division(4, 1) if lengths is LONG_ANSWERS else Division(1, 4)
    options = _options(present)
    plan = _plan(_planner(options), lengths)
    division = plan.schedule.division
    assert division is not None and division != present
    assert (division.encode < present.encode) == (lengths is LONG_ANSWERS)
    before = _plan(_planner(options[:1]), lengths)
    assert _simulated(lengths, plan) > 1.1 * _simulated(lengths, before)


def _simulated(lengths: list[tuple[int, int]], plan: SchedulePlan) -> float:
    """Return the answers per second of the middle third of answers that all wait."""
    division = plan.schedule.division
    assert division is not None
    costs = _times(division.encode, division.decode).costs()
    return rate(served(lengths * 8, plan.iteration(), costs, SMALL))


def test_a_move_that_does_not_pay_is_not_made_and_the_plan_says_why():
    """The pause is above its bound, or too long to pay, or the division has failed before."""
    present = Division(4, 1)
    best = _plan(_planner(_options(present)), LONG_ANSWERS).schedule.division
    for settings, max_pause_s, reason in (
        (dict(pause_s=2.0), 1.0, "would pause the engine for 2 s, and max_pause_s is 1"),
        (dict(pause_s=290.0), 1e3, "of which a move takes 29"),
        (dict(refused="an earlier move failed"), 1.0, "an earlier move failed"),
    ):
        plan = _plan(_planner(_options(present, **settings), max_pause_s), LONG_ANSWERS)
        assert plan.schedule.division == present
        assert plan.move is not None and plan.move.division == best
        assert reason in plan.move.refused and reason in str(plan)
        assert plan.figures()["move"]["division"] == str(best)


def test_a_bound_that_only_another_division_keeps():
    """It is a reason to move; where the pause is too long the error says what is feasible here."""
    present = Division(4, 1)
    here = WAAPlanner(times=_times(4, 1), config=lambda: SMALL)
    with pytest.raises(InfeasibleBoundError) as refused:
        _ = here.plan(lengths_of(LONG_ANSWERS), LatencyBounds(latency_s=1e-9), num_lengths=1)
    lowest_s = refused.value.lowest["latency_s"]
    plan = _plan(_planner(_options(present)), LONG_ANSWERS, 0.8 * lowest_s)
    assert plan.keeps_bounds and plan.schedule.division != present
    assert plan.move is not None and plan.move.gain == math.inf
    assert plan.figures()["move"]["gain"] is None
    with pytest.raises(InfeasibleBoundError) as refused:
        _plan(_planner(_options(present, pause_s=2.0)), LONG_ANSWERS, 0.8 * lowest_s)
    assert refused.value.lowest["latency_s"] == pytest.approx(lowest_s)
    nearest = _planner(_options(present)).nearest(
        lengths_of(LONG_ANSWERS), LatencyBounds(latency_s=1e-9), num_lengths=1
    )
    assert nearest.schedule.division != present and not nearest.keeps_bounds


def test_lengths_that_drift_move_devices_once():
    """Long prompts after long answers: one move, and none back while the lengths stay."""
    options = _options(Division(1, 4), pause_s=0.01)
    planner = _planner(options)
    plan = _plan(planner, LONG_ANSWERS)
    assert plan.schedule.division == Division(1, 4)
    first = [AnswerLength(admitted_s=float(i), num_prompt=20, num_output=40) for i in range(80)]
    adaptation = Adaptation(planner, LatencyBounds(), plan=plan, answers=first)
    moves = []
    for i in range(80, 400):
        answer = AnswerLength(admitted_s=float(i), num_prompt=300, num_output=4)
        if adaptation.observe([answer]) and (found := adaptation.revised([])) is not None:
            if found.move is not None and not found.move.refused:
                moves.append(found.move.division)
                options[:] = _options(found.move.division, pause_s=0.01)
    assert len(moves) == 1 and moves[0].encode > 1
    assert adaptation.plan is not None and adaptation.plan.schedule.division == moves[0]


def test_what_is_expected_of_a_plan_is_for_the_groups_that_there_are_now():
    """After moves its sizes can change, as those of a new plan can."""
    num_moves = 3
    planner = replace(_planner(_options(Division(4, 1))), num_moves=lambda: num_moves)
    plan = _plan(planner, LONG_ANSWERS)
    longer = lengths_of([(25, 50)] * 20)
    assert planner.expected(plan, longer, num_lengths=20).num_moves == plan.num_moves == 3
    num_moves = 4
    found = planner.expected(plan, longer, num_lengths=20)
    assert found.num_moves == 4 and found.move is None


def _rule(policy: AllocationPolicy, *, weights_bytes: int = 1000, token_bytes: float = 1.0):
    return DivisionRule(policy=policy, weights_bytes=weights_bytes, token_bytes=token_bytes)


def test_shares_of_memory_and_of_computation_by_hand():
    """WAA-M: 1000 bytes of weights each; with B_E = 2 and answers of 10 iterations 20 sequences.

    These hold 2 x 2 x 100 encoded tokens, and, as many as the slots, 12 x 105.5 decoded ones.
    """
    options = [Division(1, 1), Division(1, 2), Division(2, 1)]
    lengths, times = lengths_of([(100, 11)] * 4), _times(1, 1)
    given = _rule(AllocationPolicy.WAA_M).divisions(options, times, lengths, SMALL.max_slots)
    encode, decode = 1000 + 2 * 2 * 100, 1000 + 12 * (100 + 5.5)
    assert encode / (encode + decode) == pytest.approx(0.382, abs=1e-3)
    assert given[1] == Division(1, 2)  # a device has 0.382 of all, and 0.618 with 1/1 or 2/1
    assert given[9] == Division(2, 1) and len(given) == SMALL.max_slots  # 3000 of 5266
    # KV of encoded and decoded tokens counts for little beside large weights.
    same = _rule(AllocationPolicy.WAA_M, weights_bytes=10**9)
    assert set(same.divisions(options[:1], times, lengths, 12)) == {Division(1, 1)}
    # Five devices: two have 0.19 each of 0.382, and three 0.206 of the rest.
    five = [Division(1, 2), Division(1, 4), Division(2, 3), Division(3, 2)]
    rule = _rule(AllocationPolicy.WAA_M)
    assert rule.divisions(five, times, lengths, SMALL.max_slots)[1] == Division(2, 3)
    # WAA-C: a prompt takes 0.058 s, and an iteration of two sequences 0.011 s.
    by_computing = _rule(AllocationPolicy.WAA_C)
    long = lengths_of([(100, 3)] * 4)
    assert by_computing.divisions(options, times, long, 12)[0] == Division(2, 1)
    # A prompt of one token takes 0.031 s. Its 59 iterations are those of 4.9 steps of 12 slots,
    # of 0.017 s each, or ten times as long.
    short = lengths_of([(1, 60)] * 4)
    assert by_computing.divisions(options, times, short, 12)[0] == Division(1, 2)
    encode, decode = times.groups
    ten_times = {
        key: replace(curve, points=tuple((x, 10 * s) for x, s in curve.points))
        for key, curve in decode.decode_s.items()
    }
    slow = replace(times, groups=(encode, replace(decode, decode_s=ten_times)))
    assert by_computing.divisions([*options, Division(1, 4)], slow, short, 12)[0] == Division(1, 4)


@pytest.mark.parametrize("policy", [AllocationPolicy.WAA_C, AllocationPolicy.WAA_M])
def test_under_a_rule_devices_move_only_to_a_division_that_it_gives(policy: AllocationPolicy):
    """Or stay; and the schedule is named after the rule."""
    present = Division(4, 1)
    rule = _rule(policy)
    for lengths in (LONG_ANSWERS, LONG_PROMPTS):
        options = _options(present)
        ruled = replace(_planner(options), rules=(rule,))
        plan, free = _plan(ruled, lengths), _plan(_planner(options), lengths)
        task, times = lengths_of(lengths), options[0].times
        every = [option.division for option in options]
        given = set(rule.divisions(every, times, task, SMALL.max_slots))
        assert plan.schedule.division in given | {present}
        assert plan.schedule.layout.policy is policy and plan.family == "waa"
        assert plan.answers_per_s <= free.answers_per_s
        if plan.schedule.division != present:
            batch = plan.schedule.encode_batch
            of_batch = rule.divisions(every, times, task, SMALL.max_slots)[batch - 1]
            assert plan.schedule.division == of_batch
    both = replace(
        _planner(options), rules=tuple(map(_rule, (AllocationPolicy.WAA_C, AllocationPolicy.WAA_M)))
    )
    assert _plan(both, LONG_PROMPTS).answers_per_s >= plan.answers_per_s


def test_an_adaptation_goes_on_after_devices_were_moved_by_hand():
    """It plans for the new groups from the answers that it knows, and moves no devices itself."""
    planner = _planner(_options(Division(1, 4), pause_s=0.01))
    plan = _plan(planner, LONG_PROMPTS)
    assert plan.schedule.division != Division(1, 4)  # it would move them
    first = [AnswerLength(admitted_s=float(i), num_prompt=300, num_output=4) for i in range(80)]
    adaptation = Adaptation(planner, LatencyBounds(), plan=plan, answers=first).on_other_groups()
    assert adaptation.plan is None
    found = None
    for i in range(80, 112):
        answer = AnswerLength(admitted_s=float(i), num_prompt=300, num_output=4)
        if adaptation.observe([answer]):
            found = adaptation.revised([])
    assert found is not None and found.schedule.division == Division(1, 4)
    assert found.move is not None and "max_pause_s is 0" in found.move.refused


def test_times_of_sizes_that_were_not_measured_follow_from_those_that_were():
    """Two sizes give the part that devices share; one size counts all as shared."""
    sizes = GroupSizes(_times(1, 2, parallel=0.8))
    assert sizes.is_measured(1, 2) and not sizes.is_measured(2, 4)
    four = sizes.times(4, 1).groups[0]
    expected = _of_size(4, parallel=0.8)
    assert four.origin.device["count"] == 4
    assert four.prefill_s[64](100.0) == pytest.approx(expected.prefill_s[64](100.0))
    assert four.plan_s == expected.plan_s and sizes.times(4, 1).page_s == 1e-4
    alone = derived(_of_size(2, parallel=0.8), 4)
    assert alone.decode_s[1](0.0) == pytest.approx(_of_size(2, parallel=0.8).decode_s[1](0.0) / 2)
    sizes.add(expected)
    assert sizes.is_measured(4) and sizes.times(4, 1).groups[0] is expected
