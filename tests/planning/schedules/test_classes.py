"""A tight class and a bulk class share one engine: the bound holds, and bulk goes on."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from jaxserve.core.errors import BoundNotMetError, InfeasibleBoundError
from jaxserve.core.request import Completion, Request, Sample, Timing
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.planning import simulate
from jaxserve.planning.schedules import (
    LatencyBounds,
    Points,
    RRAPlanner,
    RRATimeline,
    SchedulePlan,
    TaskLengths,
    lengths_of,
)
from jaxserve.planning.schedules.adaptation import Adaptation, AdaptingPilot
from jaxserve.planning.schedules.continuous_planner import ContinuousPlanner
from jaxserve.planning.schedules.families import planner_of
from jaxserve.planning.schedules.measured_waa import WAAPlanner
from jaxserve.planning.schedules.observed import (
    AnswerLength,
    RequestClass,
    answer_lengths,
    classes_of,
    own_bounds,
)
from jaxserve.planning.schedules.planner import SchedulePlanner
from jaxserve.planning.schedules.played import Player
from jaxserve.planning.schedules.schedule import Estimates
from jaxserve.planning.schedules.search import throughput_under
from jaxserve.runtime.scoring import scoring
from jaxserve.scheduling.admission import OnDemand
from jaxserve.scheduling.order import DueFirst
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.retention import Stateless
from jaxserve.workload import WorkloadItem
from tests.common.tiers import some
from tests.planning.schedules.step_times import CONFIG, GROUPS, like_a_small_model

PLANNER = RRAPlanner.measured(like_a_small_model(), lambda: CONFIG)
PLAYER = Player(like_a_small_model(), PRESETS["auto"], lambda: CONFIG)
PLANNERS = {
    "rra": PLANNER,
    "continuous": ContinuousPlanner(PLAYER),
    "both": planner_of(PLAYER),
    "waa": WAAPlanner(times=GROUPS, config=lambda: CONFIG),
}
NUM_BULK = 400


class _Traffic:
    """Bulk answers that all wait, and tight requests that arrive at random beside them.

    Args:
      kind: the name of their bound.
    """

    def __init__(self, seed: int, bound_s: float, per_s: float, kind: str = "latency_bound"):
        rng = random.Random(seed)
        self.kind = kind
        self.tight_params = SamplingParams(**{kind: bound_s})
        self.bulk = [(rng.randint(20, 100), rng.randint(8, 120)) for _ in range(NUM_BULK)]
        self.tight: list[tuple[float, int, int]] = []
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(per_s)) < 0.9 * NUM_BULK / 8:
            self.tight.append((at_s, rng.randint(10, 60), rng.randint(5, 30)))

    def answers(self) -> list[AnswerLength]:
        bulk = [AnswerLength(admitted_s=0, num_prompt=p, num_output=o) for p, o in self.bulk]
        return bulk + [
            AnswerLength(
                admitted_s=at, num_prompt=p, num_output=o, bounds=own_bounds(self.tight_params)
            )
            for at, p, o in self.tight
        ]

    def plan(self, *, with_classes: bool, planner: SchedulePlanner = PLANNER) -> SchedulePlan:
        answers = self.answers()
        return planner.plan(
            lengths_of([(a.num_prompt, a.num_output) for a in answers]),
            LatencyBounds(),
            num_lengths=len(answers),
            classes=classes_of(answers, CONFIG.max_slots) if with_classes else (),
        )

    def serve(
        self, plan: SchedulePlan, *, with_bounds: bool, pilot: AdaptingPilot | None = None
    ) -> tuple[list[Completion], int, float]:
        """Return the tight answers, how many more were refused, and bulk answers/s."""
        bulk = [
            WorkloadItem(prompt_token_ids=(1,) * p, num_output_tokens=o, max_tokens=120)
            for p, o in self.bulk
        ]
        sampling = self.tight_params if with_bounds else SamplingParams()
        tight = [
            WorkloadItem(
                prompt_token_ids=(1,) * p,
                num_output_tokens=o,
                max_tokens=30,
                arrival_s=at,
                sampling=sampling,
            )
            for at, p, o in self.tight
        ]
        policy = Policy("classes", OnDemand(), DueFirst(), plan.iteration(), Stateless())
        costs = GROUPS.costs() if plan.family == "waa" else like_a_small_model()
        run = simulate([*bulk, *tight], policy, CONFIG, costs, pilot=pilot, progress=False)
        served = [c for c in run.completions[NUM_BULK:] if c.error is None]
        refused = [c for c in run.completions[NUM_BULK:] if c.error is not None]
        assert all(isinstance(c.error, BoundNotMetError) for c in refused)
        ends = [c.timing.finished_s or 0.0 for c in run.completions[:NUM_BULK]]
        assert [len(c.token_ids) for c in run.completions[:NUM_BULK]] == [o for _, o in self.bulk]
        return served, len(refused), NUM_BULK / max(ends)


@cache
def _without_bounds(seed: int, per_s: float) -> tuple[list[Completion], float]:
    """Return the tight answers and bulk answers/s of a traffic that has no bounds."""
    traffic = _Traffic(seed, 1.0, per_s)
    served, _, bulk_per_s = traffic.serve(traffic.plan(with_classes=False), with_bounds=False)
    return served, bulk_per_s


def _in_time(served: list[Completion], bound_s: float, kind: str = "latency_bound") -> float:
    """Return the share of the answers that keep a bound."""
    return float(np.mean([_taken_s(each, kind) <= bound_s for each in served]))


def _taken_s(completion: Completion, kind: str) -> float:
    times = completion.timing
    assert times.finished_s is not None and times.first_token_s is not None
    if kind == "latency_bound":
        return times.finished_s - times.arrival_s
    if kind == "first_token_bound":
        return times.first_token_s - times.arrival_s
    return (times.finished_s - times.first_token_s) / max(1, len(completion.token_ids) - 1)


@pytest.mark.parametrize(
    ("seed", "bound_s", "per_s", "share", "family"),
    some(
        [
            (0, 1.3, 1.0, 0.7, "rra"),
            (1, 2.5, 0.5, 0.8, "rra"),
            (2, 1.6, 3.0, 0.6, "rra"),
            (3, 1.5, 0.3, 0.75, "rra"),
            (1, 2.5, 0.5, 0.8, "continuous"),
            (2, 4.0, 2.0, 0.6, "continuous"),
            (3, 3.0, 0.3, 0.75, "both"),
            (1, 2.5, 0.5, 0.8, "waa"),
            (2, 3.0, 2.0, 0.6, "waa"),
        ]
    ),
)
def test_the_tight_bound_holds_and_bulk_goes_on(
    seed: int, bound_s: float, per_s: float, share: float, family: str
):
    """99 % of tight answers are in time, at most 2 % are refused, and bulk keeps a stated share.

    The share is of the bulk throughput with the same requests and no bounds, under which hardly any
    tight answer would be in time.
    """
    traffic = _Traffic(seed, bound_s, per_s)
    plan = traffic.plan(with_classes=True, planner=PLANNERS[family])
    assert plan.family == family or family == "both"
    served, num_refused, bulk_per_s = traffic.serve(plan, with_bounds=True)
    assert _in_time(served, bound_s) >= 0.99
    assert num_refused <= 0.02 * len(traffic.tight)
    without, most_per_s = _without_bounds(seed, per_s)
    assert _in_time(without, bound_s) < 0.1
    assert bulk_per_s >= share * most_per_s


@pytest.mark.release
@pytest.mark.parametrize("kind", some(["first_token_bound", "token_bound"]))
@pytest.mark.parametrize("family", some(PLANNERS))
def test_bounds_of_every_kind_hold_beside_bulk(kind: str, family: str):
    """At 1.3 times the lowest bound: 98 % in time, few are refused, and bulk keeps a third.

    Without the bound hardly any first token comes in time. (Tokens may: continuous batching alone
    has a lowest time per token that most answers keep.)
    """
    planner = PLANNERS[family]
    with pytest.raises(InfeasibleBoundError) as refused:
        _Traffic(2, 1e-6, 1.0, kind).plan(with_classes=True, planner=planner)
    [(name, lowest_s)] = refused.value.lowest.items()
    assert name == f"{kind}=1e-06"
    traffic = _Traffic(2, 1.3 * lowest_s, 1.0, kind)
    plan = traffic.plan(with_classes=True, planner=planner)
    [(_, expected_s)] = plan.classes
    assert list(expected_s) == [kind] and expected_s[kind] <= 1.3 * lowest_s
    served, num_refused, bulk_per_s = traffic.serve(plan, with_bounds=True)
    assert _in_time(served, 1.3 * lowest_s, kind) >= 0.98
    assert num_refused <= 0.03 * len(traffic.tight)
    without, most_per_s = _without_bounds(2, 1.0)
    assert _in_time(without, 1.3 * lowest_s, kind) < 0.1 or kind == "token_bound"
    assert bulk_per_s >= 0.3 * most_per_s


@pytest.mark.release
def test_a_class_that_appears_is_adapted_to():
    """A plan without classes: after the first tight answers the schedule is for their bound."""
    traffic = _Traffic(4, 1.6, 1.0)
    plan = traffic.plan(with_classes=False)
    assert not plan.classes and plan.iteration().reserved_slots == 0
    known = [a for a in traffic.answers() if a.bounds == LatencyBounds()]
    pilot = AdaptingPilot(Adaptation(PLANNER, LatencyBounds(), plan=plan, answers=known))
    served, _, _ = traffic.serve(plan, with_bounds=True, pilot=pilot)
    assert pilot.adopted
    adopted = pilot.adopted[0][1]
    assert [each.bounds.latency_s for each, _ in adopted.classes] == [1.6]
    assert adopted.keeps_bounds and adopted.iteration().reserved_slots > 0
    assert _in_time(served[len(served) // 3 :], 1.6) >= 0.98


@pytest.mark.release
def test_a_bound_that_nothing_keeps_is_left_out(caplog: pytest.LogCaptureFixture):
    """One request asked for it: the plan is the one for all others, and a warning names it."""
    traffic = _Traffic(4, 1.6, 1.0)
    absurd = AnswerLength(
        admitted_s=1.0, num_prompt=50, num_output=30, bounds=LatencyBounds(latency_s=1e-3)
    )
    answers = traffic.answers()
    lengths = lengths_of([(a.num_prompt, a.num_output) for a in answers])
    classes = classes_of([*answers, absurd], CONFIG.max_slots)
    with pytest.raises(InfeasibleBoundError):
        PLANNER.plan(lengths, LatencyBounds(), num_lengths=1, classes=classes)
    possible = PLANNER.possible(lengths, LatencyBounds(), classes)
    assert [each.bounds.latency_s for each in possible] == [1.6]
    assert "latency_bound=0.001 (lowest is" in caplog.text
    adaptation = Adaptation(PLANNER, LatencyBounds())
    assert adaptation.observe([*answers, absurd])
    plan = adaptation.revised([])
    assert plan is not None and plan.keeps_bounds
    assert [each.bounds.latency_s for each, _ in plan.classes] == [1.6]


@pytest.mark.release
def test_an_infeasible_class_is_named():
    """The error and the nearest plan say which class, and what it would take."""
    each = RequestClass(bounds=LatencyBounds(latency_s=0.05), max_answer_tokens=30, num_running=2)
    lengths = lengths_of([(50, 60)] * 64)
    with pytest.raises(InfeasibleBoundError) as refused:
        PLANNER.plan(lengths, LatencyBounds(), num_lengths=64, classes=[each])
    [lowest_s] = refused.value.lowest.values()
    assert lowest_s > 0.05
    plan = PLANNER.nearest(lengths, LatencyBounds(), num_lengths=64, classes=[each])
    assert not plan.keeps_bounds and plan.lowest == refused.value.lowest
    feasible = RequestClass(
        bounds=LatencyBounds(latency_s=1.05 * lowest_s), max_answer_tokens=30, num_running=2
    )
    kept = PLANNER.plan(lengths, LatencyBounds(), num_lengths=64, classes=[feasible])
    assert kept.keeps_bounds and kept.figures()["classes"]


def test_slots_that_memory_cannot_fill_are_reserved_all_the_same():
    """On two groups, half of the slots with a pool for six sequences: they make way when needed."""
    lengths = lengths_of([(50, 60)] * 64)
    pages = 6 * -(-80 // CONFIG.page_size)
    planner = WAAPlanner(times=GROUPS, config=lambda: replace(CONFIG, num_pages=pages))
    each = RequestClass(
        bounds=LatencyBounds(latency_s=1e3), max_answer_tokens=30, num_running=CONFIG.max_slots // 2
    )
    plain = planner.plan(lengths, LatencyBounds(), num_lengths=64)
    plan = planner.plan(lengths, LatencyBounds(), num_lengths=64, classes=[each])
    assert plan.reserved_slots == CONFIG.max_slots // 2
    assert plan.answers_per_s == pytest.approx(plain.answers_per_s)


@pytest.mark.release
def test_a_schedule_between_the_best_of_each_bound_is_found():
    """A first token in time, and a class: the best of all schedules that keep both is found.

    Under some of them neither the best schedule under one bound alone nor that under the other one
    keeps both.
    """
    rng = random.Random(5)
    lengths = lengths_of([(rng.randint(20, 100), rng.randint(8, 120)) for _ in range(200)])
    [lowest_s] = _lowest(lengths, LatencyBounds(first_token_s=1e-6))
    tight = RequestClass(bounds=LatencyBounds(latency_s=1e-6), max_answer_tokens=100, num_running=1)
    [own_s] = _lowest(lengths, LatencyBounds(), tight)
    num_between = 0
    shares = (0.99, 1.01, 1.2, 1.8, 2.5)
    firsts = [LatencyBounds(first_token_s=share * lowest_s) for share in shares]
    owns = [replace(tight, bounds=LatencyBounds(latency_s=share * own_s)) for share in shares]
    # Both bounds are kept by none below their lowest values, so plans for one are made above them.
    by_first = {bounds: PLANNER.plan(lengths, bounds, num_lengths=200) for bounds in firsts[1:]}
    by_own = {
        each: PLANNER.plan(lengths, LatencyBounds(), num_lengths=200, classes=[each])
        for each in owns[1:]
    }
    every = {each: _every(lengths, each) for each in owns}
    for bounds, each in itertools.product(firsts, owns):
        expected = float(throughput_under(bounds)(every[each]).max()) or None
        try:
            plan = PLANNER.plan(lengths, bounds, num_lengths=200, classes=[each])
        except InfeasibleBoundError:
            assert expected is None, (bounds, each)
            continue
        assert expected is not None and plan.keeps_bounds, (bounds, each)
        assert plan.answers_per_s == pytest.approx(expected, rel=1e-6), (bounds, each)
        alone = by_first[bounds], by_own[each]
        both = [
            PLANNER.expected(replace(one, bounds=bounds), lengths, num_lengths=200, classes=[each])
            for one in alone
        ]
        num_between += not any(one.keeps_bounds for one in both)
    assert num_between >= 2


def _lowest(lengths: TaskLengths, bounds: LatencyBounds, *classes: RequestClass) -> list[float]:
    with pytest.raises(InfeasibleBoundError) as refused:
        PLANNER.plan(lengths, bounds, num_lengths=200, classes=classes)
    return list(refused.value.lowest.values())


def _every(lengths: TaskLengths, each: RequestClass) -> Estimates:
    """Return what every B_E and N_D is expected to do with a class."""
    tokens = each.max_answer_tokens + PLANNER.num_awaited + 1
    own = [(tokens, each.bounds.latency_s)]
    timeline = RRATimeline(PLANNER.deploy(lengths), lengths, classes=own)
    assert len(timeline.layouts) == 1
    batch, control = np.meshgrid(
        np.arange(1, timeline.max_encode_batch + 1), np.arange(1, timeline.max_control + 1)
    )
    return timeline.estimate(Points(np.zeros(batch.size, int), batch.ravel(), control.ravel()))


def test_few_requests_with_a_bound_take_few_slots():
    """One takes three slots of 64, since two more may have come as well; two take five."""
    plain = [AnswerLength(admitted_s=i, num_prompt=5, num_output=20) for i in range(64)]
    bounds = LatencyBounds(latency_s=60.0)
    for num, most in ((1, 3), (2, 5)):
        own = [replace(each, bounds=bounds) for each in plain[:num]]
        together = [replace(each, admitted_s=7.0) for each in own]
        for bounded in (own, together):
            [each] = classes_of([*plain, *bounded], 64)
            assert each.num_running == most


def test_scores_are_no_answers():
    """A request for the log-probabilities of its prompt alone tells nothing of lengths."""
    timing = Timing(arrival_s=0.0, admitted_s=1.0, first_token_s=2.0, finished_s=3.0)
    for params, num in (
        (SamplingParams(max_tokens=1), 1),
        (scoring(SamplingParams(temperature=1.0)), 0),
    ):
        completion = Completion(
            request_id="a",
            prompt_token_ids=(1, 2),
            samples=(Sample(text="", token_ids=(5,), finish_reason="length"),),
            timing=timing,
        )
        request = Request(id="a", prompt=(1, 2), params=params, arrival_s=0.0)
        assert len(answer_lengths(request, completion)) == num


@pytest.mark.parametrize("family", some(["continuous", "both"]))
def test_classes_of_one_token_take_time(family: str):
    """All answers end with their first token: a bound below two steps is infeasible."""
    lengths = lengths_of([(50, 1)] * 64)
    each = RequestClass(bounds=LatencyBounds(latency_s=1e-6), max_answer_tokens=1, num_running=2)
    with pytest.raises(InfeasibleBoundError) as refused:
        PLANNERS[family].plan(lengths, LatencyBounds(), num_lengths=64, classes=[each])
    [lowest_s] = refused.value.lowest.values()
    assert lowest_s > 1e-3


def test_merged_classes_have_bounds_that_some_request_has():
    """Bounds that grow with the answers stay bounds on as long answers."""
    answers = [
        AnswerLength(
            admitted_s=i,
            num_prompt=5,
            num_output=20 * (1 + i % 8),
            bounds=LatencyBounds(latency_s=1.0 + i % 8),
        )
        for i in range(80)
    ]
    classes = classes_of(answers, 64)
    assert len(classes) == 4
    for each in classes:
        assert each.max_answer_tokens == pytest.approx(20 * each.bounds.latency_s)


def test_classes_are_few_and_the_tightest_bound_of_each_counts():
    """Ten bounds make four classes; one takes no more slots than its share of half of them."""
    answers = [
        AnswerLength(
            admitted_s=i,
            num_prompt=5,
            num_output=10 + i % 7,
            bounds=LatencyBounds(latency_s=1 + i % 10),
        )
        for i in range(200)
    ]
    classes = classes_of([*answers, AnswerLength(admitted_s=0, num_prompt=1, num_output=99)], 64)
    assert [each.bounds.latency_s for each in classes] == [1, 3, 6, 8]
    assert all(each.max_answer_tokens == 16 for each in classes)
    assert all(1 <= each.num_running <= 8 for each in classes)
    assert classes_of([], 64) == ()
