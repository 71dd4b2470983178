"""A schedule follows the lengths of the newest answers, in the discrete simulation too."""

from __future__ import annotations

import json
import logging
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxserve.core.prediction import LengthPrediction
from jaxserve.planning import simulate
from jaxserve.planning.schedules import LatencyBounds, RRAPlanner
from jaxserve.planning.schedules.adaptation import Adaptation, AdaptingPilot, task_of
from jaxserve.planning.schedules.lengths import lengths_of
from jaxserve.planning.schedules.measured_waa import WAAPlanner
from jaxserve.planning.schedules.observed import AnswerLength
from jaxserve.planning.schedules.plan import Move, SchedulePlan
from jaxserve.planning.schedules.planner import SchedulePlanner, ScheduleSpace
from jaxserve.planning.schedules.schedule import Division
from jaxserve.predictor import LengthBuckets
from jaxserve.scheduling.admission import OnDemand
from jaxserve.scheduling.lengths import LengthEstimate
from jaxserve.scheduling.order import FCFS
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.retention import Stateless
from jaxserve.workload import WorkloadItem
from tests.planning.schedules.step_times import CONFIG, GROUPS, like_a_small_model

PLANNER = RRAPlanner.measured(like_a_small_model(), lambda: CONFIG)


def _answers(num: int, longest: int, seed: int, begin_s: float = 0.0) -> list[AnswerLength]:
    rng = random.Random(seed)
    return [
        AnswerLength(
            admitted_s=begin_s + i,
            num_prompt=rng.randint(20, 100),
            num_output=rng.randint(8, longest),
        )
        for i in range(num)
    ]


def _adaptation(answers: list[AnswerLength], bound_s: float) -> Adaptation:
    bounds = LatencyBounds(latency_s=bound_s)
    plan = PLANNER.nearest(task_of(answers), bounds, num_lengths=len(answers))
    return Adaptation(PLANNER, bounds, plan=plan, answers=answers)


def _after(adaptation: Adaptation, answers: list[AnswerLength]) -> int | None:
    """Feed answers as they end; return after how many the schedule changed, or None."""
    for i, answer in enumerate(answers):
        if adaptation.observe([answer]) and adaptation.revised([]) is not None:
            return i + 1
    return None


def test_the_first_plan_waits_for_64_answers():
    """Without a plan, the first answers make one, however alike they are."""
    adaptation = Adaptation(PLANNER, LatencyBounds())
    assert _after(adaptation, _answers(1000, 120, seed=0)) == 64
    assert adaptation.plan is not None and adaptation.plan.num_lengths == 64


def test_equal_lengths_keep_the_schedule():
    """New answers like the plan's are searched for again as they double, not more often."""
    adaptation = _adaptation(_answers(300, 120, seed=0), 3.0)
    schedule = adaptation.plan and adaptation.plan.schedule
    changed = _after(adaptation, _answers(600, 120, seed=1, begin_s=1000))
    assert adaptation.num_searches <= 2
    if changed is not None:  # more answers tell more of the longest ones
        assert changed >= 300
    assert adaptation.plan is not None and schedule is not None
    assert adaptation.plan.schedule.num_decodes == pytest.approx(schedule.num_decodes, rel=0.3)


@pytest.mark.parametrize(("longest", "soon"), [(60, 320), (240, 200)])
def test_other_lengths_change_the_schedule_soon(longest: int, soon: int):
    """Answers of half or twice the length: another schedule, within the bound.

    The plan is the one that is best for the new lengths alone. One that only serves more needs the
    lengths of 256 answers.
    """
    adaptation = _adaptation(_answers(300, 120, seed=0), 4.0)
    newest = _answers(400, longest, seed=1, begin_s=1000)
    changed = _after(adaptation, newest)
    assert changed is not None and changed <= soon
    assert adaptation.plan is not None and adaptation.plan.keeps_bounds
    assert adaptation.plan.max_answer_tokens == pytest.approx(longest, rel=0.1)


def test_after_a_refused_plan_the_search_runs_again_soon():
    """The plan before serves, and the next search comes after 64 to 96 answers, once."""
    known = _answers(300, 120, seed=0)
    adaptation = _adaptation(known, 4.0)
    before = adaptation.plan
    assert _after(adaptation, _answers(400, 60, seed=1, begin_s=1000)) is not None
    num_before = adaptation.num_searches
    adaptation.refuse(before)
    assert adaptation.plan is before
    changed = _after(adaptation, _answers(96, 60, seed=2, begin_s=3000))
    assert changed is not None and 64 <= changed <= 96
    assert adaptation.plan is not before and adaptation.num_searches == num_before + 1


@pytest.mark.release
def test_a_bound_that_becomes_infeasible_is_said_once(caplog: pytest.LogCaptureFixture):
    """The nearest schedule serves; a warning says so, and another when the bound is kept again."""
    adaptation = _adaptation(_answers(300, 40, seed=0), 1.0)
    assert adaptation.plan is not None and adaptation.plan.keeps_bounds
    with caplog.at_level(logging.WARNING):
        _after(adaptation, _answers(300, 250, seed=1, begin_s=1000))
        assert not adaptation.plan.keeps_bounds and adaptation.plan.lowest["latency_s"] > 1.0
        assert [r for r in caplog.records if "no schedule keeps the bounds" in r.message]
        for i in range(3):
            _after(adaptation, _answers(100, 250, seed=2 + i, begin_s=2000 + 1000 * i))
        assert len(caplog.records) == 1
        for i in range(3):
            _after(adaptation, _answers(200, 40, seed=9 + i, begin_s=10_000 + 1000 * i))
    assert adaptation.plan.keeps_bounds
    assert "kept again" in caplog.records[-1].message and len(caplog.records) == 2


def test_answers_that_run_are_no_evidence_of_short_ones():
    """Of 200 new answers only the short ones have ended: the schedule stays, as they are alike."""
    adaptation = _adaptation(_answers(600, 120, seed=0), 3.0)
    newest = _answers(400, 120, seed=1, begin_s=1000)
    running = [replace(a, num_output=30, has_ended=False) for a in newest if a.num_output > 30]
    adaptation.observe([a for a in newest if a.num_output <= 30])
    assert adaptation.revised(running) is None and not adaptation.num_searches


def test_predictions_tell_the_rest_of_answers_that_run():
    """An answer that goes on counts with its prediction, given the tokens that it has."""
    buckets = LengthBuckets.equal_width(100, 10)
    even = LengthEstimate(LengthPrediction(buckets, np.full(10, 0.1)))
    running = AnswerLength(
        admitted_s=1, num_prompt=5, num_output=50, has_ended=False, estimate=even
    )
    ended = AnswerLength(admitted_s=0, num_prompt=5, num_output=20)
    outputs = task_of([ended, running]).outputs
    assert outputs.probabilities[20] == pytest.approx(0.5)
    assert outputs.probabilities[:51].sum() == pytest.approx(0.5)
    assert outputs.mean == pytest.approx((20 + 75.5) / 2)
    over = replace(running, num_output=120)
    assert task_of([over]).outputs.percentile(0.5) == 121


def test_predictions_end_at_the_limit():
    """Half of the predicted lengths are beyond `max_tokens`, where the answer ends."""
    even = LengthEstimate(LengthPrediction(LengthBuckets.equal_width(100, 10), np.full(10, 0.1)))
    running = AnswerLength(
        admitted_s=1, num_prompt=5, num_output=20, has_ended=False, estimate=even, limit=60
    )
    outputs = task_of([running]).outputs
    assert outputs.max_length == 60
    assert outputs.probabilities[60] == pytest.approx(0.5 + 1 / 80)
    late = replace(running, num_output=120, limit=122)
    assert task_of([late]).outputs.percentile(0.5) == 121


class _Careless(SchedulePlanner):
    """A planner whose new plans serve more than twice as much, and miss their bounds."""

    max_slots = PLANNER.max_slots

    def space(self, *arguments: Any) -> ScheduleSpace:
        return PLANNER.space(*arguments)

    def nearest(self, *arguments: Any, **named: Any) -> SchedulePlan:
        plan = PLANNER.nearest(*arguments, **named)
        late_s = 1.1 * plan.bounds.latency_s
        rate = 3 * plan.answers_per_s
        return replace(plan, answers_per_s=rate, latency_s=late_s, lowest={"latency_s": late_s})


def test_a_schedule_that_keeps_the_bounds_stays():
    """The search finds none that does; what is known of the last move of devices stays, too."""
    known, bounds = _answers(100, 120, seed=0), LatencyBounds(latency_s=4.0)
    move = Move(
        present=Division(1, 3),
        division=Division(2, 2),
        gain=1.5,
        expected_pause_s=0.1,
        max_pause_s=math.inf,
        is_measured=True,
        pause_s=0.2,
    )
    plan = replace(PLANNER.plan(task_of(known), bounds, num_lengths=len(known)), move=move)
    adaptation = Adaptation(_Careless(), bounds, plan=plan, answers=known)
    assert _after(adaptation, _answers(128, 120, seed=1, begin_s=1000)) is None
    assert adaptation.num_searches == 1 and adaptation.plan is not None
    assert adaptation.plan.keeps_bounds and not adaptation.plan.lowest
    assert adaptation.plan.move == move and not move.is_due
    assert json.loads(json.dumps(move.figures(), allow_nan=False))["max_pause_s"] is None


def test_a_tighter_bound_is_searched_for_once():
    """Also for two device groups: later searches wait as ever."""
    planner, known = WAAPlanner(times=GROUPS, config=lambda: CONFIG), _answers(300, 120, seed=0)
    plan = planner.plan(task_of(known), LatencyBounds(), num_lengths=len(known))
    adaptation = Adaptation(planner, LatencyBounds(), plan=plan, answers=known)
    bounded = [
        replace(each, bounds=LatencyBounds(latency_s=50.0)) for each in _answers(250, 120, 1, 1000)
    ]
    for answer in bounded:
        if adaptation.observe([answer]):
            adaptation.revised([])
    assert adaptation.num_searches == 1


def test_bounds_that_the_order_does_not_heed_are_left_out():
    """No class, so no reserved slot, and no search for a tighter bound."""
    adaptation = Adaptation(PLANNER, LatencyBounds(), heeds_bounds=False)
    answers = [
        replace(each, bounds=LatencyBounds(latency_s=50.0)) for each in _answers(96, 120, seed=0)
    ]
    assert _after(adaptation, answers[:64]) == 64
    assert adaptation.plan is not None and not adaptation.plan.reserved_slots
    _after(
        adaptation, [replace(each, bounds=LatencyBounds(latency_s=9.0)) for each in answers[64:]]
    )
    assert adaptation.num_searches == 1


def test_a_schedule_that_exceeds_the_memory_is_replaced():
    """The pool becomes smaller: the present schedule serves more by its figures, but cannot."""
    config = CONFIG
    planner = RRAPlanner.measured(like_a_small_model(), lambda: config)
    known = _answers(100, 120, seed=0)
    plan = planner.plan(task_of(known), LatencyBounds(), num_lengths=len(known))
    adaptation = Adaptation(planner, LatencyBounds(), plan=plan, answers=known)
    config = replace(CONFIG, num_pages=40)
    present = planner.expected(plan, task_of(known), num_lengths=len(known))
    assert plan.fits and not present.fits
    assert _after(adaptation, _answers(128, 120, seed=1, begin_s=1000)) is not None
    assert adaptation.plan is not None and adaptation.plan.fits
    assert adaptation.plan.answers_per_s < present.answers_per_s


@pytest.mark.release
def test_a_simulated_engine_adapts_and_loses_nothing():
    """Answers become twice as long in the middle; with adaptation most keep the bound again."""
    rng = random.Random(4)
    lengths = [(rng.randint(20, 100), rng.randint(8, 60 if i < 400 else 120)) for i in range(1200)]
    items = [
        WorkloadItem(prompt_token_ids=(1,) * p, num_output_tokens=o, max_tokens=200)
        for p, o in lengths
    ]
    lowest = PLANNER.nearest(
        lengths_of(lengths[400:]), LatencyBounds(latency_s=1e-6), num_lengths=1
    )
    bounds = LatencyBounds(latency_s=1.2 * lowest.latency_s)
    plan = PLANNER.plan(lengths_of(lengths[:400]), bounds, num_lengths=400)
    kept = {}
    for adapts in (False, True):
        before = [
            AnswerLength(admitted_s=-math.inf, num_prompt=p, num_output=o) for p, o in lengths[:400]
        ]
        pilot = AdaptingPilot(Adaptation(PLANNER, bounds, plan=plan, answers=before))
        simulation = simulate(
            items,
            Policy("rra", OnDemand(), FCFS(), plan.iteration(), Stateless()),
            CONFIG,
            like_a_small_model(),
            pilot=pilot if adapts else None,
            progress=False,
        )
        done = simulation.completions
        assert [len(c.token_ids) for c in done] == [o for _, o in lengths]
        spent = [(c.timing.finished_s or 0) - (c.timing.admitted_s or 0) for c in done]
        kept[adapts] = float(np.mean(np.array(spent[900:]) <= bounds.latency_s))
        if adapts:
            assert pilot.adopted and pilot.adopted[-1][1].keeps_bounds
    assert kept[True] >= 0.99 > kept[False]
