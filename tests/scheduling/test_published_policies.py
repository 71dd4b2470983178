"""What defines each of the policies that others published, in the simulator."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidSamplingParamsError
from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.planning import simulate
from jaxserve.predictor import LengthBuckets
from jaxserve.scheduling.lengths import LengthEstimate
from jaxserve.scheduling.ltr import LearningToRank
from jaxserve.scheduling.mlfq import FeedbackQueues
from jaxserve.scheduling.order import ShortestPredictedFirst
from jaxserve.scheduling.past_future import PastFuture, peak_tokens
from jaxserve.scheduling.policy import Policy, QueueView
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.seer import SiblingLengths
from jaxserve.scheduling.sequence import Phase
from jaxserve.scheduling.tie import TailInflated
from jaxserve.scheduling.trail import LimitedPreemption
from jaxserve.scheduling.uniboost import Boosted, LatestBoosted
from jaxserve.workload import WorkloadItem
from tests.scheduling.simulated import (
    SECOND,
    certain,
    engine_of,
    item_of,
    request_of,
    run_to_end,
)

pytestmark = pytest.mark.fast

BUCKETS = LengthBuckets.equal_width(200, 200)
# A step of n iterations takes n seconds.
ONE_SLOT = EngineConfig(
    num_pages=100, max_slots=1, max_context=400, max_step_tokens=64, max_decode_iterations=4
)
MANY_SLOTS = replace(ONE_SLOT, max_slots=4, slot_buckets=(), head_buckets=())


def _run(
    policy: str | Policy,
    items: list[WorkloadItem],
    config: EngineConfig = ONE_SLOT,
    predictions: list[LengthPrediction] | None = None,
) -> list[Completion]:
    chosen = PRESETS[policy] if isinstance(policy, str) else policy
    done = simulate(
        items, chosen, config, SECOND, predictions=predictions, progress=False
    ).completions
    assert all(
        len(each.token_ids) == item.num_output_tokens
        for each, item in zip(done, items, strict=True)
    )
    return list(done)


def _ends(done: list[Completion]) -> list[float]:
    return [each.timing.finished_s or 0.0 for each in done]


def _as_predicted(items: list[WorkloadItem]) -> list[LengthPrediction]:
    return [certain(item.num_output_tokens, BUCKETS) for item in items]


def _stream_behind_a_long_one(every_s: float) -> list[WorkloadItem]:
    """Return a long answer that waits for the first, and short ones, of 5 s for one slot."""
    return [item_of(20), item_of(100, 1.0), *(item_of(5, 2.0 + every_s * i) for i in range(30))]


@pytest.mark.parametrize("order", [ShortestPredictedFirst(ageing_s=1.0), TailInflated(decay_s=3.0)])
def test_short_answers_go_first_and_a_long_one_does_not_starve(order):
    """Those that come soon after it overtake it; then its age counts for more than its length."""
    items = _stream_behind_a_long_one(every_s=5.0)
    policy = replace(PRESETS["tie"], order=order)
    _, long_s, *short_s = _ends(_run(policy, items, predictions=_as_predicted(items)))
    num_before = sum(end_s < long_s for end_s in short_s)
    assert 10 <= num_before <= 25
    _, long_s, *short_s = _ends(_run("vllm_like", items))
    assert long_s < min(short_s)


def test_tie_weighs_the_tail_of_the_longest_answers():
    """Of two answers of the same expected length the one that may be long goes last."""
    assert LengthEstimate(LengthPrediction(LengthBuckets((0, 100)), np.ones(1))).tail_mean(
        0.1
    ) == pytest.approx(95.5)
    probabilities = np.zeros(200)
    probabilities[[9, 189]] = 0.75, 0.25
    risky, sure = LengthPrediction(BUCKETS, probabilities), certain(55, BUCKETS)
    assert risky.mean_length == sure.mean_length == 55.0
    items = [item_of(20), *(replace(item_of(n, 1.0), max_tokens=190) for n in (10, 55))]
    risky_s, sure_s = _ends(_run("tie", items, predictions=[certain(20, BUCKETS), risky, sure]))[1:]
    assert sure_s < risky_s


def test_the_knob_of_uniboost_turns_from_the_least_work_to_the_first_arrival():
    """No length is predicted: the work that is known is the prompt."""
    items = [item_of(20), item_of(5, 1.0, num_prompt=60), item_of(5, 2.0, num_prompt=3)]
    ends = {}
    for gamma in (1e-3, 10.0):
        order = Boosted(gamma, prompt_token_s=1.0, token_s=1.0)
        ends[gamma] = _ends(_run(replace(PRESETS["uniboost"], order=order), items))
    assert ends[1e-3][2] < ends[1e-3][1] and ends[10.0][1] < ends[10.0][2]


def test_uniboost_preempts_the_answer_that_has_had_most():
    """If all came at once: its boost is the least."""
    engine = engine_of("uniboost", MANY_SLOTS)
    for number in range(3):
        engine.add(request_of(str(number), max_tokens=100))
        for _ in range(4):
            engine.step()
    running = list(engine.scheduler.running)
    ranked = LatestBoosted().ranked(running, engine.scheduler.lengths)
    had = [each.num_planned_outputs for each in ranked]
    assert had == sorted(had, reverse=True) and len(set(had)) == 3


def test_mlfq_preempts_a_long_answer_for_short_ones_and_promotes_it():
    """It has its quantum each time that it had no token for a while."""
    items = _stream_behind_a_long_one(every_s=7.0)
    policy = replace(PRESETS["mlfq"], order=FeedbackQueues(quantum=8, promotes_s=40.0))
    first, long, *short = _run(policy, items)
    late = [each.timing.latency_s or 0.0 for each in _run("vllm_like", items)[2:]]
    soon = [each.timing.latency_s or 0.0 for each in short]
    assert first.timing.num_preemptions and long.timing.num_preemptions > 1
    assert sorted(soon)[20] <= 15 and sorted(late)[20] > 50


@pytest.mark.parametrize("promotes_s, starves", [(20.0, False), (1e9, True)])
def test_mlfq_starves_without_promotion(promotes_s: float, starves: bool):
    """While short ones keep the slot, a long prompt gets no token unless it returns to the top."""
    items = _stream_behind_a_long_one(every_s=5.0)
    items[1] = item_of(50, 1.0, num_prompt=60)
    order = FeedbackQueues(quantum=8, prompt_tokens=1, promotes_s=promotes_s)
    done = _run(replace(PRESETS["mlfq"], order=order), items)
    begins_s = done[1].timing.first_token_s or 0.0
    assert begins_s > max(_ends(done[2:])) if starves else begins_s < 60


def test_mlfq_has_long_prompts_join_further_down():
    """A quantum of a level is twice that of the level before."""
    queues = FeedbackQueues(quantum=2, prompt_tokens=10)
    assert [queues.level_of(n) for n in (1, 20, 21, 40, 41, 400)] == [0, 0, 1, 1, 2, 5]


@pytest.mark.parametrize(
    "arrives_s, limit, num_preemptions", [(10.0, 0.8, 1), (40.5, 1.0, 1), (40.5, 0.8, 0)]
)
def test_trail_preempts_no_answer_that_is_nearly_complete(
    arrives_s: float, limit: float, num_preemptions: int
):
    """A shorter one preempts it until it has had the share `limit` of its predicted length."""
    items = [item_of(50), item_of(3, arrives_s)]
    policy = replace(PRESETS["trail"], order=LimitedPreemption(limit, ageing_s=100.0))
    long, short = _run(policy, items, predictions=_as_predicted(items))
    assert long.timing.num_preemptions == num_preemptions
    assert (_ends([short]) < _ends([long])) == bool(num_preemptions)


def test_learning_to_rank_preempts_for_what_is_ranked_before():
    """The score is given once: an answer with less left than the other is long is preempted."""
    items = [item_of(50), item_of(10, 42.0)]
    long, short = _run("ltr", items, predictions=_as_predicted(items))
    assert long.timing.num_preemptions == 1 and _ends([short]) < _ends([long])
    items = [item_of(10), item_of(50, 2.0)]
    done = _run("ltr", items, predictions=_as_predicted(items))
    assert not any(each.timing.num_preemptions for each in done)


@pytest.mark.parametrize("starves, begins_before_s", [(20, 60.0), (10**9, math.inf)])
def test_learning_to_rank_has_a_starving_answer_run(starves: int, begins_before_s: float):
    """It has priority after `starves` iterations without a token, and keeps it for its turn."""
    items = _stream_behind_a_long_one(every_s=5.0)
    policy = replace(PRESETS["ltr"], order=LearningToRank(starves=starves))
    done = _run(policy, items, predictions=_as_predicted(items))
    begins_s = done[1].timing.first_token_s or 0.0
    assert begins_s < begins_before_s
    assert starves < 100 or begins_s > max(_ends(done[2:]))


def test_a_sample_does_not_preempt_the_one_whose_prompt_it_shares():
    """It would wait for that one again, which would compute the prompt without end."""
    policy = replace(PRESETS["ltr"], order=LearningToRank(starves=4, period=2))
    engine = engine_of(policy, replace(ONE_SLOT, max_step_tokens=8, token_buckets=()))
    samples = dict(n=2, temperature=1.0, max_tokens=30, forced_length=(30, 30))
    first, second = engine.add(request_of("group", tuple(range(40)), **samples))
    for _ in range(200):
        engine.step()
    assert first.phase is second.phase is Phase.FINISHED
    assert first.num_preemptions == second.num_preemptions == 0


def test_seer_begins_with_one_sample_of_each_group_and_goes_on_with_the_longest():
    """First come, first served, it would go through one group after the other."""
    begun = {}
    for policy in ("seer", "vllm_like"):
        engine = engine_of(policy, ONE_SLOT, cost=SECOND)
        lengths = {"short": (5, 7, 6), "long": (40, 30, 50)}
        samples = [
            sample
            for name, each in lengths.items()
            for sample in engine.add(
                request_of(name, n=3, temperature=1.0, max_tokens=60, forced_length=each)
            )
        ]
        run_to_end(engine)
        samples.sort(key=lambda each: each.times.admitted_s or 0.0)
        begun[policy] = [f"{each.request.id} {each.sample_index}" for each in samples]
    assert begun["seer"] == ["short 0", "long 0", "long 1", "long 2", "short 1", "short 2"]
    assert begun["vllm_like"] == [f"{name} {i}" for name in ("short", "long") for i in range(3)]


def test_seer_corrects_what_it_expects_by_the_longest_sibling():
    """Before a sample has ended it is the limit of the length."""
    groups, engine = SiblingLengths().new_state(), engine_of("vllm_like", MANY_SLOTS)
    samples = engine.add(
        request_of("group", n=3, temperature=1.0, max_tokens=60, forced_length=(30, 5, 50))
    )
    for sample in samples:
        groups.key(sample, engine.scheduler.lengths)
    view = QueueView(
        waiting=(),
        num_waiting=0,
        running=(),
        lengths=engine.scheduler.lengths,
        now_s=0.0,
        expected_arrivals=lambda: None,
    )
    expected = [groups.expected(samples[2])]
    while samples[2].phase is not Phase.FINISHED:
        engine.step()
        expected.append(groups.expected(samples[2]))
        groups.update(view)
    assert list(dict.fromkeys(expected)) == [60, 5, 30]


def _of_tenants(num: dict[str, int], arrives_s: dict[str, float]) -> list[WorkloadItem]:
    return [
        replace(item_of(10, arrives_s[name]), sampling=SamplingParams(tenant=name))
        for name, count in num.items()
        for _ in range(count)
    ]


def _had_by(done: list[Completion], items: list[WorkloadItem], until_s: float) -> dict[str, int]:
    """Return how many answers of each tenant have ended by then."""
    had: dict[str, Any] = {}
    for each, item in zip(done, items, strict=True):
        name = item.sampling.tenant or ""
        had[name] = had.get(name, 0) + ((each.timing.finished_s or 0.0) <= until_s)
    return had


def test_vtc_serves_two_tenants_equally():
    """One floods the queue before the other comes; under FCFS the other waits for all of it."""
    items = _of_tenants({"a": 40, "b": 15}, {"a": 0.0, "b": 1.0})
    done = _run("vtc", items, MANY_SLOTS)
    for until_s in (40.0, 70.0):
        had = _had_by(done, items, until_s)
        assert had["b"] >= 4 and abs(had["a"] - had["b"]) <= 2 * MANY_SLOTS.max_slots, had
    assert _had_by(_run("vllm_like", items, MANY_SLOTS), items, 70.0)["b"] == 0


def test_vtc_lifts_a_tenant_that_was_idle():
    """The service that it did not ask for is not saved up: from then on both have the same."""
    items = _of_tenants({"a": 60, "b": 30}, {"a": 0.0, "b": 60.0})
    done = _run("vtc", items, MANY_SLOTS)
    before = _had_by(done, items, 60.0)
    after = _had_by(done, items, 130.0)
    gained = {name: after[name] - before[name] for name in after}
    assert before["a"] >= 16 and before["b"] == 0
    assert gained["b"] >= 8 and abs(gained["a"] - gained["b"]) <= 2 * MANY_SLOTS.max_slots, gained


@pytest.mark.parametrize("tenant", ["", 3])
def test_a_tenant_is_a_name(tenant):
    """Anything else is refused with what is allowed."""
    with pytest.raises(InvalidSamplingParamsError, match="tenant=.*a string that is not empty"):
        SamplingParams(tenant=tenant)


def test_the_peak_of_the_memory_to_come():
    """It is that of a count, iteration by iteration, over which each holds a token more."""
    rng = np.random.default_rng(0)
    for num in range(1, 9):
        held, left = rng.integers(1, 50, num).astype(float), rng.integers(1, 60, (3, num))
        counted = max(
            (held[ends >= t] + t).sum() for ends, t in itertools.product(left, range(1, 60))
        )
        assert peak_tokens(held, left) == counted


def test_past_future_admits_by_the_lengths_of_past_answers():
    """Before any has ended all count to their limits; then more run, and few are preempted."""
    config = EngineConfig(
        num_pages=61, max_slots=16, page_size=8, max_context=256, max_step_tokens=256
    )
    items = [replace(item_of(24, num_prompt=8), max_tokens=200) for _ in range(64)]
    done = _run("past_future", items, config)
    admitted_s = [each.timing.admitted_s or 0.0 for each in done]
    assert admitted_s.count(min(admitted_s)) <= 2
    later = [each.timing.num_preemptions for each in done]
    on_demand = [each.timing.num_preemptions for each in _run("vllm_like", items, config)]
    assert sum(later) < sum(on_demand) / 2
    assert max(_ends(done)) < 0.5 * sum(item.num_output_tokens for item in items)


def test_past_future_draws_from_answers_longer_than_an_answer_is_by_now():
    """One of 101 past answers is longer than the 10 tokens that it has had: it ends there."""
    engine = engine_of("past_future", MANY_SLOTS)
    lengths = engine.scheduler.lengths
    lengths.past.extend([5] * 100 + [100])
    engine.add(request_of("runs", max_tokens=100))
    (sequence,) = engine.scheduler.waiting
    while sequence.num_planned_outputs < 10:
        engine.step()
    (waits,) = engine.add(request_of("waits", max_tokens=5))
    headroom = PastFuture(reserve_share=0.0).headroom([sequence], MANY_SLOTS, lengths, lambda: None)
    to_come = 100 - sequence.num_planned_outputs
    assert headroom.pages(waits) * MANY_SLOTS.page_size >= to_come - MANY_SLOTS.page_size
