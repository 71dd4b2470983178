"""Requests with latency bounds of their own: their order, their place in RRA, and refusals."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import BoundNotMetError
from jaxserve.core.request import Request
from jaxserve.engine.engine import Engine
from jaxserve.execution.step_cost import FlatCost
from jaxserve.memory.disk_tier import DiskTier, PageFiles
from jaxserve.planning import simulate
from jaxserve.predictor import LengthBuckets
from jaxserve.scheduling.admission import OnDemand
from jaxserve.scheduling.iteration.continuous import Unified
from jaxserve.scheduling.iteration.rra import RRA
from jaxserve.scheduling.iteration.waa import WAA
from jaxserve.scheduling.order import FCFS, DueFirst
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.retention import Stateless, Tiered
from jaxserve.scheduling.sequence import Sequence
from jaxserve.testing import Trace
from jaxserve.workload import WorkloadItem
from tests.common.tiers import some
from tests.memory.gate import GatedFiles
from tests.scheduling.simulated import SECOND, certain, engine_of, item_of, request_of

pytestmark = pytest.mark.fast

CONFIG = EngineConfig(
    num_pages=100, max_slots=4, max_context=200, max_step_tokens=64, max_decode_iterations=4
)


def _rra(**settings: float) -> Policy:
    shape = RRA(**{"encode_batch": 2, "decode_iterations": 40, **settings})
    return Policy("rra", OnDemand(), DueFirst(), shape, Stateless())


def _continuous(**settings: int) -> Policy:
    return Policy("continuous", OnDemand(), DueFirst(), Unified(**settings), Stateless())


def _item(num_output: int, arrival_s: float = 0.0, bound_s: float | None = None) -> WorkloadItem:
    return item_of(num_output, arrival_s, latency_bound=bound_s)


def _admissions(items: list[WorkloadItem], order: DueFirst | FCFS) -> list[int]:
    """Return the order in which an engine with one slot admits the items."""
    config = replace(CONFIG, max_slots=1, slot_buckets=(), head_buckets=())
    policy = replace(PRESETS["vllm_like"], order=order)
    done = simulate(items, policy, config, SECOND, progress=False).completions
    return sorted(range(len(items)), key=lambda i: done[i].timing.admitted_s or 0.0)


def test_the_earliest_due_goes_first_and_others_come_as_they_came():
    """Bounds of 900 and 500 s, then those without; one that waited long is before a new one."""
    items = [_item(30), _item(5, 1.0), _item(5, 1.5, 900.0), _item(5, 2.0, 500.0)]
    assert _admissions(items, DueFirst(ageing_s=10_000)) == [0, 3, 2, 1]
    assert _admissions(items, DueFirst(ageing_s=10)) == [0, 1, 2, 3]
    free = [_item(30), _item(3, 1.0), _item(5, 1.5)]
    assert _admissions(free, DueFirst()) == _admissions(free, FCFS()) == [0, 1, 2]


def test_a_bounded_prompt_does_not_wait_for_the_encode_phase():
    """It is computed after the loops in flight, while the running answers get a token each."""
    items = [_item(40), _item(40), _item(40), _item(40), _item(6, 3.0, 60.0)]
    config = replace(CONFIG, max_slots=5, slot_buckets=(), head_buckets=())
    first, unbounded = (
        simulate(each, _rra(decode_batch=4.0), config, SECOND, progress=False)
        for each in (items, [*items[:4], _item(6, 3.0)])
    )
    assert (first.completions[4].timing.first_token_s or 0) <= 3.0 + 2 * 4 + 1
    assert (unbounded.completions[4].timing.first_token_s or 0) > 40
    mixed = [step for step in first.steps if step.kind == "mixed" and step.num_rows == 3]
    assert mixed and mixed[0].num_tokens == 2 + 3


@pytest.mark.parametrize("policy", [_rra(encode_batch=4), _continuous(reserved_slots=1)])
def test_a_full_engine_makes_way(policy: Policy):
    """All slots are taken: the last answer without a bound is preempted, and loses no token."""
    bounded = _item(60, 0.0, 500.0)  # it has the reserved slot, if there is one
    items = [*(_item(60) for _ in range(3)), bounded, _item(6, 5.0, 60.0)]
    run = simulate(items, policy, CONFIG, SECOND, progress=False)
    assert run.stats.num_preemptions == 1
    assert (run.completions[4].timing.first_token_s or 0) <= 5.0 + 2 * 4 + 1
    assert [len(c.token_ids) for c in run.completions] == [60, 60, 60, 60, 6]


def test_nothing_makes_way_for_what_awaits_the_disk(tmp_path):
    """All slots are taken, and the request's pages are on their way: one is preempted after it."""
    fast = FlatCost(per_iteration_s=0.01, per_token_s=0.0)
    config = replace(CONFIG, page_size=4, num_pages=300, num_host_pages=20)
    policy = replace(_rra(encode_batch=4), retention=Tiered())
    prompt = tuple(range(1, 30))

    def engine_on(files: Any) -> tuple[Engine, DiskTier, VirtualClock]:
        clock, disk = VirtualClock(), DiskTier(files)
        return engine_of(policy, config, clock, parts={"disk": disk}, cost=fast), disk, clock

    before, _, clock = engine_on(PageFiles(tmp_path, 100_000))
    before.add(_request("before", 4, 1e4, clock, prompt))
    while before.has_work:
        before.step()
    before.close(is_whole=True)
    files = GatedFiles(tmp_path)
    files.reading.shut()
    engine, disk, clock = engine_on(files)
    for i in range(4):
        engine.add(request_of(f"{i}", (i + 40, 2), clock.now(), max_tokens=150))
    for _ in range(6):
        engine.step()
    [bounded] = engine.add(_request("bounded", 4, 100.0, clock, prompt))
    for _ in range(6):
        engine.step()
    assert engine.awaits_disk
    assert len(engine.scheduler.running) == 4 and not engine.scheduler.counters()["num_preemptions"]
    files.reading.open()
    while engine.has_work:
        while engine.awaits_disk and not disk.has_arrived:
            time.sleep(0.001)
        engine.step()
    engine.scheduler.check_integrity()
    assert len(bounded.output) == 4 and engine.scheduler.counters()["num_preemptions"] == 1
    assert engine.stats.num_prefix_hit_on_disk > 0
    engine.close(is_whole=True)


def test_bounded_requests_pass_bulk_that_is_held_up():
    """It came before them, and waits for a running one with a bound, or for the limit."""
    order = DueFirst(ageing_s=1.0)
    cost = FlatCost(per_iteration_s=1.0, per_token_s=0.125)
    config = replace(CONFIG, max_decode_iterations=2)
    long = item_of(4, 22.0, num_prompt=60)
    items = [_item(45), _item(40, 20.0, 52.0), long, _item(4, 24.0, 70.0)]
    run = simulate(items, replace(PRESETS["auto"], order=order), config, cost, progress=False)
    assert not any(each.error for each in run.completions)
    admitted = [each.timing.admitted_s or 0.0 for each in run.completions]
    assert admitted[3] < 24 + 10 and admitted[2] > admitted[3]
    limited = replace(PRESETS["vllm_like"], order=order, iteration=Unified(max_running=2))
    items = [_item(60), _item(60), _item(5, 2.0), _item(5, 3.0, 500.0)]
    run = simulate(items, limited, CONFIG, SECOND, progress=False)
    admitted = [each.timing.admitted_s or 0.0 for each in run.completions]
    assert admitted[3] < 3 + 10 and admitted[2] > 50


@pytest.mark.parametrize(
    "policy",
    [
        _rra(encode_batch=4, reserved_slots=2),
        _continuous(reserved_slots=2),
        _continuous(reserved_slots=2, max_running=4),
    ],
)
def test_reserved_slots_are_for_bounded_requests(policy: Policy):
    """Of four slots two are reserved, so only two answers without a bound run at a time."""
    items = [_item(30) for _ in range(6)]
    run = simulate(items, policy, CONFIG, SECOND, progress=False)
    assert max(step.num_running for step in run.steps) == 2
    bounded = [_item(30, 0.0, 1e6) for _ in range(6)]
    run = simulate(bounded, policy, CONFIG, SECOND, progress=False)
    assert max(step.num_running for step in run.steps) == 4
    run = simulate([*bounded[:2], *items], policy, CONFIG, SECOND, progress=False)
    assert run.steps[0].num_rows == 4  # two in the reserved slots, and two in the others


@pytest.mark.parametrize(
    "policy",
    some(
        [
            _rra(encode_batch=3, decode_iterations=20, reserved_slots=1),
            _rra(encode_batch=1, decode_batch=2.0, decode_iterations=10, reserved_slots=1),
            _continuous(reserved_slots=1),
            _continuous(reserved_slots=1, max_running=3),
        ]
    ),
    ids=["rra", "rra with few", "continuous", "continuous with few"],
)
def test_a_long_backlog_leaves_the_reserved_slots(policy: Policy):
    """After 300 s it comes before what arrives then, which is accepted all the same, and in time.

    More than there are reserved slots for are refused at once.
    """
    bulk = [_item(30) for _ in range(60)]
    tight = [_item(6, at_s, 40.0) for at_s in (50.0, 340.0, 400.0)]
    run = simulate([*bulk, *tight], policy, CONFIG, SECOND, progress=False)
    for completion in run.completions[len(bulk) :]:
        timing = completion.timing
        assert completion.error is None and timing.finished_s is not None
        assert timing.finished_s - timing.arrival_s <= 40.0
    assert all(completion.error is None for completion in run.completions)
    many = [_item(30, 340.0, 40.0) for _ in range(4)]
    run = simulate([*bulk, *many], policy, CONFIG, SECOND, progress=False)
    errors = [completion.error for completion in run.completions[len(bulk) :]]
    assert errors[0] is None and all(isinstance(each, BoundNotMetError) for each in errors[1:])


def test_bounded_answers_in_reserved_slots_hold_up_no_others():
    """Three slots are always taken by bounded answers: those without a bound begin all the same.

    The schedule has one running answer on average.
    """
    policy = _rra(encode_batch=1, decode_batch=1.0, decode_iterations=4, reserved_slots=3)
    bounded = [_item(20, float(at), 900.0) for at in range(0, 600, 7)]
    items = [*bounded, *(_item(4, 30.0) for _ in range(6))]
    done = simulate(items, policy, CONFIG, SECOND, progress=False).completions[len(bounded) :]
    assert max(each.timing.finished_s or 1e9 for each in done) < 300


def test_where_all_slots_are_reserved_one_sequence_without_a_bound_runs():
    items = [_item(3) for _ in range(3)]
    run = simulate(items, _continuous(reserved_slots=9), CONFIG, SECOND, progress=False)
    assert max(step.num_running for step in run.steps) == 1


@pytest.mark.release
@pytest.mark.parametrize("name", some(["auto", "exegpt_rra", "exegpt_waa_c", "vllm_like"]))
def test_bounds_change_no_token(name: str):
    """Random traces in which every other request has a bound, with small and large reserves."""
    num_preemptions = 0
    for seed in range(40):
        trace = Trace(seed)
        rng = random.Random(f"bounds {seed}")
        policy = replace(PRESETS[name], order=DueFirst(ageing_s=rng.choice([3.0, 1e7])))
        shapes = {
            "exegpt_rra": RRA(encode_batch=2, decode_iterations=5),
            "exegpt_waa_c": WAA(encode_batch=2, decode_iterations=2),
            "vllm_like": Unified(max_running=rng.randint(1, 6)),
        }
        if name in shapes:
            shape = replace(shapes[name], reserved_slots=rng.randint(0, 9))
            policy = replace(policy, iteration=shape)
        engine = trace.engine(policy)
        requests = [
            replace(request, params=replace(request.params, latency_bound=1e6))
            if rng.random() < 0.5
            else request
            for request in trace.requests
        ]
        sequences = []
        while requests or engine.has_work:
            if requests and rng.random() < 0.4:
                sequences += engine.add(requests.pop(0))
            engine.step()
            engine.scheduler.check_integrity()
        ends = {(s.request.id, s.sample_index): tuple(s.output) for s in sequences}
        wanted = trace.expected(trace.requests)
        assert ends == {key: end.output for key, end in wanted.items()}, f"seed {seed}"
        num_preemptions += engine.scheduler.counters()["num_preemptions"]
    assert num_preemptions > 0


def test_a_few_stalled_steps_refuse_nothing():
    """Two of ten steps wait 1000 s for their executables: the time of an iteration stays 1 s."""
    clock = VirtualClock()
    config = replace(CONFIG, max_decode_iterations=1)
    engine = engine_of("auto", config, clock, cost=SECOND)
    engine.add(_request("before", 100, 1e6, clock))
    for i in range(10):
        engine.step()
        if i in (1, 4):
            clock.advance_to(clock.now() + 1000.0)
    durations = [(step.collected_s or 0.0) - step.submitted_s for step in engine.recorder.steps]
    assert max(durations) >= 1000.0
    assert engine.recorder.iteration_s == pytest.approx(1.0)
    [sequence] = engine.add(_request("in time", 20, 100.0, clock))
    assert sequence.error is None


@pytest.mark.parametrize("num_iterations", [1, 4])
def test_a_slow_spell_is_forgotten_on_a_busy_engine(num_iterations: int):
    """For 100 steps an iteration takes 50 s, then 1 s again, and the engine is never idle.

    A request is refused in the spell. Six fast steps later it is not refused any more. Three slow
    steps among fast ones do not count.
    """
    clock = VirtualClock()
    config = replace(CONFIG, max_context=4000, max_decode_iterations=num_iterations)
    engine = engine_of("auto", config, clock, cost=SECOND)
    engine.add(_request("busy", 3000, 1e9, clock))

    def advance(num_steps: int, extra_s: float) -> None:
        for _ in range(num_steps):
            engine.step()
            clock.advance_to(clock.now() + extra_s)

    advance(10, 0.0)
    advance(100, 49.0 * num_iterations)
    assert (engine.recorder.iteration_s or 0.0) > 20
    [refused] = engine.add(_request("in the spell", 20, 60.0, clock))
    assert isinstance(refused.error, BoundNotMetError)
    advance(6, 0.0)
    assert engine.recorder.iteration_s == pytest.approx(1.0)
    [served] = engine.add(_request("after it", 20, 60.0, clock))
    assert served.error is None
    advance(3, 49.0 * num_iterations)
    assert engine.recorder.iteration_s == pytest.approx(1.0)
    while not served.finish_reason:
        engine.step()
    assert served.error is None and len(served.output) == 20


def test_an_idle_engine_refuses_nothing():
    """After steps of 100 s each, a request with a bound of 50 s is served by an idle engine."""
    clock = VirtualClock()
    config = replace(CONFIG, max_decode_iterations=1)
    engine = engine_of("auto", config, clock, cost=SECOND)

    def served(name: str, bound_s: float, wait_s: float) -> Sequence:
        [sequence] = engine.add(_request(name, 20, bound_s, clock))
        clock.advance_to(clock.now() + wait_s)
        while engine.has_work:
            engine.step()
            clock.advance_to(clock.now() + (99.0 if name == "slow" else 0.0))
        return sequence

    assert served("slow", 5.0, 0.0).error is None  # nothing is known of the time of a step
    assert (engine.recorder.iteration_s or 0.0) > 50
    first = served("first", 50.0, 0.0)
    assert first.error is None and len(first.output) == 20
    # What has waited for longer than its bound before it began is late, whatever the pace.
    assert isinstance(served("passed", 50.0, 60.0).error, BoundNotMetError)
    for i in range(2):
        served(f"{i}", 50.0, 0.0)
    assert engine.recorder.iteration_s == pytest.approx(1.0)


def test_the_queue_counts():
    """A request that would be in time alone is refused where earlier ones fill the engine."""
    clock = VirtualClock()
    config = replace(CONFIG, max_slots=1, slot_buckets=(), head_buckets=())
    engine = engine_of("auto", config, clock, cost=SECOND)
    for i in range(3):
        engine.add(_request(f"{i}", 20, 1e5, clock))
    for _ in range(4):
        engine.step()
    [alone] = engine.add(_request("due first", 20, 38.0, clock))
    assert alone.error is None  # it goes before those that wait
    [queued] = engine.add(_request("due last", 20, 39.0, clock))
    assert isinstance(queued.error, BoundNotMetError) and queued.error.wait_s > 20


def test_what_makes_way_is_not_counted():
    """All slots are taken for 60 s: RRA preempts one, so a bound of 30 s is accepted and kept.

    Where nothing makes way, the same request is refused.
    """
    items = [*(_item(60) for _ in range(4)), _item(6, 10.0, 30.0)]
    run = simulate(items, _rra(encode_batch=4), CONFIG, SECOND, progress=False)
    assert run.completions[4].error is None and run.stats.num_preemptions == 1
    assert (run.completions[4].timing.latency_s or 99) <= 30
    assert [len(c.token_ids) for c in run.completions] == [60, 60, 60, 60, 6]
    stands = replace(PRESETS["vllm_like"], order=DueFirst())
    run = simulate(items, stands, CONFIG, SECOND, progress=False)
    assert isinstance(run.completions[4].error, BoundNotMetError)
    # Those before it in order, and those with a bound of their own, do not make way.
    items = [*(_item(60, 0.0, 500.0) for _ in range(4)), _item(6, 10.0, 30.0)]
    run = simulate(items, _rra(encode_batch=4), CONFIG, SECOND, progress=False)
    assert isinstance(run.completions[4].error, BoundNotMetError)


def test_a_request_waits_where_the_running_ones_end_in_time():
    """No slot is free for 16 s: a bound of 40 s is deferred, and one of 15 s is refused."""
    config = replace(CONFIG, max_slots=1, slot_buckets=(), head_buckets=())
    items = [_item(24), _item(50), _item(6, 8.0, 40.0), _item(6, 9.0, 15.0)]
    run = simulate(items, PRESETS["auto"], config, SECOND, progress=False)
    bulk, deferred, refused = run.completions[1:]
    assert isinstance(refused.error, BoundNotMetError) and refused.error.wait_s > 10
    assert deferred.error is None and (deferred.timing.latency_s or 99) <= 40
    # It waited for the first one, and the one without a bound, which came before it, for it.
    assert (deferred.timing.admitted_s or 0) - 8.0 > 10
    assert (bulk.timing.admitted_s or 0) > (deferred.timing.admitted_s or 99)
    assert len(bulk.token_ids) == 50


def test_what_waited_too_long_is_refused_before_it_begins():
    """An answer runs for longer than was predicted, so the request behind it has no time left."""
    config = replace(CONFIG, max_slots=1, slot_buckets=(), head_buckets=())
    ten = certain(10, LengthBuckets.equal_width(100, 100))
    items = [_item(60), _item(6, 5.0, 20.0), _item(6, 6.0, 200.0)]
    run = simulate(
        items, PRESETS["auto"], config, SECOND, predictions=[ten, None, None], progress=False
    )
    first, late, loose = run.completions
    assert len(first.token_ids) == 60 and len(loose.token_ids) == 6
    assert isinstance(late.error, BoundNotMetError) and not late.token_ids
    # Not before it would be late if it began at once, and long before the slot is free.
    assert 20 - 6 <= late.error.wait_s <= 20 - 6 + CONFIG.max_decode_iterations
    assert (late.timing.finished_s or 99) < 30
    assert late.timing.admitted_s is None


def _request(
    name: str,
    num_tokens: int,
    bound_s: float,
    clock: VirtualClock,
    prompt: tuple[int, ...] = (1, 2),
) -> Request:
    return request_of(name, prompt, clock.now(), max_tokens=num_tokens, latency_bound=bound_s)
