"""Prompts and answers on groups of their own: by hand, on random traces, and refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from jaxserve import Runtime
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import HandoverError, InvalidConfigError
from jaxserve.engine.engine import Engine
from jaxserve.execution.step_cost import FlatCost
from jaxserve.planning import GroupCosts, Simulation, simulate
from jaxserve.report.trace import trace_events
from jaxserve.scheduling.admission import OnDemand, Predicted
from jaxserve.scheduling.iteration.rra import RRA
from jaxserve.scheduling.iteration.waa import DECODE, ENCODE, WAA
from jaxserve.scheduling.order import FCFS, Priority
from jaxserve.scheduling.plan import LINK, StepPlan
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.preemption import LastInOrder
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.retention import Stateless, Tiered
from jaxserve.testing import ExecutorWrapper, FaultyExecutor, Trace, check_policy
from jaxserve.testing.tiny import tiny_llama
from jaxserve.workload import WorkloadItem
from tests.common.tiers import seeds, some
from tests.scheduling.simulated import engine_of, item_of, request_of, run_to_end

EXEGPT = PRESETS["exegpt_waa_c"]
CONFIG = EngineConfig(page_size=4, num_pages=80, max_slots=8, max_context=64, max_step_tokens=64)
# A prompt takes 2 s on one group, a token 1 s on the other, a page 0.25 s on the link.
COSTS = GroupCosts((FlatCost(2.0, 0.0), FlatCost(1.0, 0.0)), page_bytes=10.0, link_bytes_per_s=40.0)


def _item(num_output: int) -> WorkloadItem:
    return item_of(num_output, num_prompt=6)


def _run(items: list[WorkloadItem], shape: WAA, costs: GroupCosts = COSTS) -> Simulation:
    return simulate(items, replace(EXEGPT, iteration=shape), CONFIG, costs, progress=False)


def _times(run: Simulation) -> list[tuple[float | None, float | None]]:
    return [(c.timing.first_token_s, c.timing.finished_s) for c in run.completions]


def test_two_requests_by_hand():
    """A: prompt 0-2, copy of two pages 2-2.5, tokens 2.5-5.5; B: 2-4, 4-4.5, and then 5.5-7.5.

    B's prompt and copy are computed beside A's answer. A's last step is planned before B's copy is
    done, so B joins after it.
    """
    run = _run([_item(4), _item(3)], WAA(encode_batch=1))
    assert _times(run) == [(2.0, 5.5), (4.0, 7.5)]
    assert [(step.kind, step.group) for step in sorted(run.steps, key=lambda s: s.index)] == [
        ("mixed", ENCODE),
        ("mixed", ENCODE),
        ("handover", LINK),
        *[("decode loop", DECODE)] * 3,
        ("handover", LINK),
        *[("decode loop", DECODE)] * 2,
    ]
    assert run.stats.num_pages_handed_over == 4 and run.stats.num_steps == 7


def test_a_copy_begins_behind_the_steps_of_its_source():
    """As on devices: A's copy waits for B's prompt until 4, and B joins A's last step."""
    costs = replace(COSTS, copies_follow_steps=True)
    run = _run([_item(4), _item(3)], WAA(encode_batch=1), costs)
    assert _times(run) == [(2.0, 7.5), (4.0, 8.5)]


def test_the_link_holds_up_a_sequence_and_no_group():
    """Copies of eight seconds: B's prompt, and A's tokens during B's copy, take no longer."""
    slow = replace(COSTS, link_bytes_per_s=2.5)
    run = _run([_item(12), _item(3)], WAA(encode_batch=1), slow)
    # A is copied until 10 and B until 18; its second token is that of A's ninth step.
    assert _times(run) == [(2.0, 21.0), (4.0, 21.0)]


def test_answers_of_one_token_are_not_handed_over():
    """They end in the encode group, which has the next batch at once."""
    run = _run([_item(1)] * 5, WAA(encode_batch=2))
    assert run.wall_s == 6.0 and run.stats.num_pages_handed_over == 0


def test_an_encode_batch_waits_where_too_many_run():
    """B_D is two, with a tenth on top: the third begins when the first's last step is planned."""
    items = [_item(8)] * 3
    run = _run(items, WAA(encode_batch=1, decode_batch=2.0))
    (_, first_end), _, (third_token, _) = _times(run)
    assert (first_end, third_token) == (9.5, 7.5 + 2.0)
    assert _times(_run(items, WAA(encode_batch=1)))[2][0] == 6.0


def test_groups_compute_at_once():
    """A stream of requests takes less than the sum of the groups' times, and more than each."""
    items = [_item(6) for _ in range(24)]
    run = _run(items, WAA(encode_batch=2))
    seconds = {ENCODE: 0.0, DECODE: 0.0, LINK: 0.0}
    for step in run.steps:
        seconds[step.group] += {ENCODE: 2.0, DECODE: 1.0, LINK: 0.0}[step.group]
    assert max(seconds.values()) < run.wall_s < 0.75 * sum(seconds.values())


POLICIES = [
    EXEGPT,
    Policy(
        "on demand",
        OnDemand(0.0),
        Priority(),
        WAA(encode_batch=2, decode_iterations=5, decode_batch=3.5, encode_tokens=9.0),
        Stateless(),
    ),
    Policy("reserved", Predicted(), FCFS(), WAA(encode_batch=20, threshold=0.0), Stateless()),
]


@seeds(40, 10)
@pytest.mark.parametrize("policy", some(POLICIES), ids=lambda policy: policy.name)
def test_random_traces(seeds, policy):
    """Every request ends once, with the tokens that it has alone, also after preemptions."""
    checked = check_policy(policy, num_traces=len(seeds))
    assert (checked.num_preemptions == 0) == (policy is EXEGPT)


@pytest.mark.release
@seeds(25)
@pytest.mark.parametrize("policy", some(POLICIES), ids=lambda policy: policy.name)
def test_caches_are_exchanged_on_random_traces(seeds, policy):
    """As a move of devices does it: all KV is lost, and every token is as without the loss."""
    sizes = 0
    for seed in seeds:
        trace = Trace(seed, with_faults=seed % 2 == 1)
        trace.check(policy, cancel_rate=0.03, recompute_rate=0.05)
        sizes += len(trace.pool_sizes)
    assert sizes > 35


class LosesAPage(ExecutorWrapper):
    """Copies all but the first page of each handover."""

    def submit(self, plan: StepPlan):
        handovers = tuple(replace(each, pages=each.pages[1:]) for each in plan.handovers)
        return self.inner.submit(replace(plan, handovers=handovers))


def test_a_page_that_is_not_copied_changes_the_tokens():
    """The traces would find it, because each group reads its own memory."""
    num_wrong = 0
    for seed in range(10):
        trace = Trace(seed)
        lengths = trace.answer_length
        engine = engine_of(EXEGPT, trace.config, wrap=LosesAPage, answer_length=lengths)
        sequences = [s for request in trace.requests for s in engine.add(request)]
        while engine.has_work:
            engine.step()
        wanted = trace.expected(trace.requests)
        num_wrong += sum(
            tuple(s.output) != wanted[s.request.id, s.sample_index].output for s in sequences
        )
    assert num_wrong > 20


def test_another_size_of_batches_is_adopted_while_requests_run():
    """But no shape for another number of groups."""
    engine = engine_of(EXEGPT, CONFIG)
    engine.adopt(WAA(encode_batch=7))
    assert engine.scheduler.policy.iteration == WAA(encode_batch=7)
    with pytest.raises(InvalidConfigError, match="1 device groups.*exegpt_waa_c.* has 2"):
        engine.adopt(RRA(encode_batch=7, decode_iterations=2))
    other = engine_of("exegpt_rra", CONFIG)
    with pytest.raises(InvalidConfigError, match="2 device groups"):
        other.adopt(WAA(encode_batch=7))


class OneGroup(ExecutorWrapper):
    """An executor as a device has it."""

    @property
    def num_device_groups(self) -> int:
        return 1


def test_an_executor_without_groups_is_refused():
    """By the engine, and by a runtime before it compiles anything."""
    with pytest.raises(InvalidConfigError, match="exegpt_waa_c.*2 device groups.*exegpt_rra"):
        engine_of(EXEGPT, CONFIG, wrap=OneGroup)
    with pytest.raises(InvalidConfigError, match="exegpt_waa_m.*2 device groups.*exegpt_rra"):
        Runtime(tiny_llama(), policy="exegpt_waa_m")


@pytest.mark.parametrize(
    "choice", [{"retention": Tiered()}, {"preemption": LastInOrder(keeps_state=True)}], ids=str
)
def test_kv_that_stays_behind_in_a_group_is_refused(choice):
    """Prompts are computed in one group's memory, and answers end in the other's."""
    with pytest.raises(InvalidConfigError, match="2 device groups and keeps KV"):
        replace(EXEGPT, **choice)


def test_a_trace_shows_the_groups_beside_each_other():
    """One track for each group and one for the link; steps of a track do not overlap."""
    run = _run([_item(6)] * 6, WAA(encode_batch=2))
    events = [event for event in trace_events(run.steps, run.requests) if event["ph"] == "X"]
    steps = [e for e in events if e["name"] in ("mixed", "decode loop", "handover")]
    names = {}
    for event in steps:
        names.setdefault(event["tid"], set()).add(event["name"])
    assert sorted(map(sorted, names.values())) == [["decode loop"], ["handover"], ["mixed"]]
    for track in names:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in steps if e["tid"] == track)
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(spans))


def _serve(trace: Trace, policy: Policy, loses_every: int) -> tuple[Engine, list]:
    """Serve a trace's requests on groups whose link loses pages."""
    wrap = partial(FaultyExecutor, loses_every=loses_every)
    engine = engine_of(policy, trace.config, wrap=wrap, answer_length=trace.answer_length)
    sequences = [s for request in trace.requests for s in engine.add(request)]
    run_to_end(engine)
    return engine, sequences


@pytest.mark.parametrize("policy", some(POLICIES), ids=lambda policy: policy.name)
def test_pages_that_are_lost_are_computed_anew(policy):
    """Where every other handover is lost, the tokens are right and no page is leaked."""
    num_lost = 0
    for seed in range(10):
        trace = Trace(seed)
        engine, sequences = _serve(trace, policy, 2)
        wanted = trace.expected(trace.requests)
        for each in sequences:
            if not isinstance(each.error, HandoverError):
                assert tuple(each.output) == wanted[each.request.id, each.sample_index].output, seed
        assert engine.scheduler.page_usage().num_owned == 0
        num_lost += int(engine.scheduler.counters()["num_handovers_lost"])
    assert num_lost > 20


def test_a_link_that_loses_everything_fails_requests_and_no_more():
    """A request of several tokens fails with a typed error; one of a single token is answered."""
    engine = engine_of(EXEGPT, CONFIG, wrap=partial(FaultyExecutor, loses_every=1))
    requests = [request_of(str(i), max_tokens=num) for i, num in enumerate((1, 5, 5, 1))]
    sequences = [s for request in requests for s in engine.add(request)]
    while engine.has_work:
        engine.step()
    assert [s.finish_reason for s in sequences] == ["length", "error", "error", "length"]
    with pytest.raises(HandoverError, match="request 1: .* in 3 attempts"):
        raise sequences[1].error
    assert engine.scheduler.page_usage().num_owned == 0
