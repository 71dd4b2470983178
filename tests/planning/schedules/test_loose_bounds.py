"""Requests with loose bounds of their own do not keep a plan from the bounds of all others."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import pytest

from jaxserve.core.errors import InfeasibleBoundError
from jaxserve.planning.schedules import LatencyBounds
from jaxserve.planning.schedules.adaptation import Adaptation, task_of
from jaxserve.planning.schedules.families import planner_of
from jaxserve.planning.schedules.observed import AnswerLength, classes_of
from jaxserve.planning.schedules.played import Player
from jaxserve.scheduling.presets import PRESETS
from tests.planning.schedules.step_times import CONFIG, like_a_small_model, lowest_s

PLANNER = planner_of(Player(like_a_small_model(), PRESETS["auto"], lambda: CONFIG))
NUM = 300


def _answers(begin_s: float = 0.0, bound_s: float | None = None) -> list[AnswerLength]:
    """Return answers of which one has a latency bound of its own, if there is one."""
    rng = random.Random(0)
    answers = [
        AnswerLength(
            admitted_s=begin_s + i, num_prompt=rng.randint(20, 100), num_output=rng.randint(8, 120)
        )
        for i in range(NUM)
    ]
    if bound_s is not None:
        answers[9] = replace(answers[9], bounds=LatencyBounds(latency_s=bound_s))
    return answers


@pytest.fixture(scope="module")
def lowest() -> float:
    """The lowest bound that a schedule keeps without requests that have bounds of their own."""
    return lowest_s(PLANNER, task_of(_answers()))


@pytest.mark.release
def test_the_class_is_left_out_where_both_cannot_be_kept(lowest: float, caplog):
    """Its reserved slots would cost the bound; a warning names it, and a plan without it is found.

    The error before that says the lowest bound without the reserved slots.
    """
    answers = _answers(bound_s=60.0)
    task, classes = task_of(answers), classes_of(answers, CONFIG.max_slots)
    bounds = LatencyBounds(latency_s=1.1 * lowest)
    with pytest.raises(InfeasibleBoundError) as refused:
        PLANNER.plan(task, bounds, num_lengths=NUM, classes=classes)
    assert refused.value.lowest["latency_s"] == pytest.approx(lowest)
    with caplog.at_level(logging.WARNING, "jaxserve"):
        assert PLANNER.possible(task, bounds, classes) == ()
    assert "no slots are reserved for requests with latency_bound=60" in caplog.text
    assert PLANNER.plan(task, bounds, num_lengths=NUM).keeps_bounds


@pytest.mark.release
def test_classes_stay_where_the_bounds_are_infeasible_without_them(lowest: float):
    """Then the bounds of all are at fault, and a search without the class would find nothing."""
    answers = _answers(bound_s=60.0)
    task, classes = task_of(answers), classes_of(answers, CONFIG.max_slots)
    bounds = LatencyBounds(latency_s=0.5 * lowest)
    assert PLANNER.possible(task, bounds, classes) == classes


@pytest.mark.release
def test_an_adapted_plan_keeps_its_bounds(lowest: float, caplog):
    """A single request with a bound of ten minutes does not make a plan miss its own."""
    bounds, known = LatencyBounds(latency_s=1.8 * lowest), _answers()
    plan = PLANNER.plan(task_of(known), bounds, num_lengths=NUM)
    adaptation = Adaptation(PLANNER, bounds, plan=plan, answers=known)
    with caplog.at_level(logging.WARNING, "jaxserve"):
        for answer in _answers(begin_s=1000.0, bound_s=600.0):
            if adaptation.observe([answer]):
                adaptation.revised([])
    assert adaptation.num_searches > 0 and adaptation.plan is not None
    assert adaptation.plan.keeps_bounds
    assert "no schedule keeps the bounds" not in caplog.text
