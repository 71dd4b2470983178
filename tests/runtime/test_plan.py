"""A runtime plans a schedule under a latency bound, and serves by it."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import (
    EngineBusyError,
    InfeasibleBoundError,
    InvalidConfigError,
    InvalidProfileError,
    RuntimeClosedError,
    UnheededBoundError,
)
from jaxserve.execution.executor import StepHandle
from jaxserve.scheduling.plan import StepPlan
from jaxserve.sharding import DeviceGroups, StagePlan, make_mesh
from jaxserve.testing import ExecutorWrapper, RecordingExecutor, SlowExecutor, WrapAll
from jaxserve.testing.tiny import OPTIONS, random_prompts, tiny_llama
from tests.common.tiers import some
from tests.runtime.serving import until_tokens

PROMPTS = random_prompts(8, longest=30)
PARAMS = [SamplingParams(max_tokens=4 + 5 * i) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory):
    """The answers of a runtime that does not plan, and a file with its step times."""
    path = tmp_path_factory.mktemp("step times") / "times.json"
    with Runtime(tiny_llama(), **OPTIONS) as rt:
        rt.measure_step_times(rounds=1).save(path)
        return [one.token_ids for one in rt.generate(PROMPTS, PARAMS)], path


def _num_beside_prompts(plans: Sequence[StepPlan]) -> int:
    """Return how many rows of mixed steps compute an answer's next token."""
    rows = [row for plan in plans if not plan.is_decode_loop for row in plan.rows]
    lengths = [len(prompt) for prompt in PROMPTS]
    return sum(row.start >= lengths[row.sequence_key % len(lengths)] for row in rows)


@pytest.mark.release
def test_a_plan_is_adopted_and_answers_keep_their_tokens(measured: tuple[list, Path]):
    """The plan comes from the observed lengths; then no answer advances beside prompts."""
    answers, path = measured
    recording = WrapAll(RecordingExecutor)
    with Runtime(
        tiny_llama(), wrap_executor=recording, **OPTIONS | {"strict": True, "warmup": True}
    ) as rt:
        rt.load_step_times(path)
        rt.generate(PROMPTS, PARAMS)
        plans = recording.executors[0].plans
        num_before = len(plans)
        assert _num_beside_prompts(plans)
        plan = rt.plan(math.inf, policies=("rra",))
        assert plan.num_lengths == len(PROMPTS) and plan.family == "rra"
        assert plan.max_answer_tokens == PARAMS[-1].max_tokens
        assert plan.latency_s <= plan.latency_bound_s and plan.tokens_per_s > plan.answers_per_s > 0
        assert [one.token_ids for one in rt.generate(PROMPTS, PARAMS)] == answers
        assert len(plans) > num_before
        assert not _num_beside_prompts(plans[num_before:])
        rt.check_integrity()


@pytest.mark.release
def test_a_plan_that_is_not_adopted_changes_nothing(measured: tuple[list, Path]):
    """Steps are those of a runtime without a plan, and the given lengths are used."""
    with Runtime(tiny_llama(), **OPTIONS) as rt:
        rt.load_step_times(measured[1])
        rt.generate(PROMPTS, PARAMS)
        steps = [(step.kind, step.num_rows) for step in rt.report().steps]
        plan = rt.plan(math.inf, lengths=[(10, 20), (12, 30)], adopt=False)
        assert plan.num_lengths == 2 and plan.max_answer_tokens == 30
        rt.forget_kept_pages()
        rt.generate(PROMPTS, PARAMS)
        assert [(step.kind, step.num_rows) for step in rt.report().steps] == steps * 2


@pytest.mark.release
@pytest.mark.parametrize("num_replicas", some([1, 2]))
def test_running_requests_survive_plans(measured: tuple[list, Path], num_replicas: int):
    """Plans of different families and bounds: nothing is lost, and the tokens stay."""
    answers, path = measured
    mesh = None if num_replicas == 1 else make_mesh(data=num_replicas)
    with Runtime(tiny_llama(), mesh=mesh, wrap_executor=SlowExecutor, **OPTIONS) as rt:
        rt.load_step_times(path)
        asked = list(zip(PROMPTS, PARAMS, strict=True)) * 4
        pending = [rt.submit(*each) for each in asked]
        until_tokens(rt, 20)
        loose = rt.plan(math.inf, lengths=[(10, 20)], policies=("rra",))
        rt.plan(math.inf, lengths=[(10, 20)], policies=("continuous",))
        num_unfinished = sum(not each.future.done() for each in pending)
        rt.plan(1.2 * _lowest_s(rt), lengths=[(10, 20)])
        assert num_unfinished and loose.answers_per_s > 0
        assert [each.result(60).token_ids for each in pending] == answers * 4
        rt.check_integrity()


@pytest.mark.release
def test_a_plan_waits_for_running_requests_no_longer_than_it_is_told(
    measured: tuple[list, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without step times it raises, and measures nothing; running and later requests go on."""
    answers, _ = measured
    with Runtime(tiny_llama(), wrap_executor=SlowExecutor, **OPTIONS) as rt:
        monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))  # without kept step times
        running = rt.submit(PROMPTS[-1], PARAMS[-1])
        with pytest.raises(EngineBusyError, match="max_wait_s"):
            rt.plan(math.inf, lengths=[(10, 20)], max_wait_s=0.0)
        later = rt.submit(PROMPTS[0], PARAMS[0])
        assert running.result(60).token_ids == answers[-1]
        assert later.result(60).token_ids == answers[0]
        assert not list(tmp_path.iterdir())


@pytest.mark.release
def test_a_plan_knows_the_answers_that_it_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The shortest of eight answers has ended: step times are measured after the longest."""
    slow = WrapAll(SlowExecutor)
    with Runtime(tiny_llama(), wrap_executor=slow, **OPTIONS) as rt:
        monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))  # without kept step times
        pending = [rt.submit(*each) for each in zip(PROMPTS, PARAMS, strict=True)]
        pending[0].result(60)
        running = sum(not each.future.done() for each in pending)
        [executor] = slow.executors

        def hurry() -> None:
            executor.step_s = 0.0

        threading.Timer(0.2, hurry).start()
        plan = rt.plan(math.inf, adopt=False)
        assert running and plan.num_lengths == len(PROMPTS)
        assert plan.max_answer_tokens == PARAMS[-1].max_tokens


def test_an_infeasible_bound_is_refused_with_the_lowest_one(measured: tuple[list, Path]):
    """The error's bound is feasible, and a refused plan leaves the runtime as it was."""
    answers, path = measured
    with Runtime(tiny_llama(), **OPTIONS) as rt:
        rt.load_step_times(path)
        with pytest.raises(InfeasibleBoundError, match="lowest"):
            rt.plan(1e-9, lengths=[(10, 20)])
        lowest_s = _lowest_s(rt)
        assert rt.plan(1.001 * lowest_s, lengths=[(10, 20)]).latency_s <= 1.001 * lowest_s
        assert [one.token_ids for one in rt.generate(PROMPTS, PARAMS)] == answers


@pytest.mark.release
def test_families_of_plans_are_chosen(measured: tuple[list, Path]):
    """A limit on running sequences serves the same tokens; report and stats name the family."""
    answers, path = measured
    with Runtime(tiny_llama(), **OPTIONS) as rt:
        rt.load_step_times(path)
        plan = rt.plan(lengths=[(10, 20)], policies=("continuous",))
        assert plan.family == "continuous" and plan.estimate == "simulated"
        assert [one.token_ids for one in rt.generate(PROMPTS, PARAMS)] == answers
        limit = plan.schedule.max_running
        assert max(step.num_running for step in rt.report().steps) <= limit
        assert rt.report().policy == f"auto (continuous, at most {limit})"
        stats = rt.stats().plan
        assert stats is not None and stats.figures()["max_running"] == limit
        for wrong in (("waa",), (), "rra", 7, [["rra"]]):
            with pytest.raises(InvalidConfigError, match="policies="):
                rt.plan(lengths=[(10, 20)], policies=wrong)
    with Runtime(tiny_llama(), policy="exegpt_rra", **OPTIONS) as rt:
        rt.load_step_times(path)
        assert rt.plan(lengths=[(10, 20)], adopt=False).family == "rra"


@pytest.mark.release
def test_without_answers_or_a_bound_there_is_no_plan(measured: tuple[list, Path]):
    """Cancelled answers and scores are no lengths; errors are typed, also after the end."""
    rt = Runtime(tiny_llama(), wrap_executor=SlowExecutor, **OPTIONS)
    with rt:
        rt.load_step_times(measured[1])
        pending = rt.submit(PROMPTS[0], SamplingParams(max_tokens=60))
        pending.cancel()
        pending.result(60)
        assert len(rt.score(PROMPTS[0])) == len(PROMPTS[0]) - 1
        with pytest.raises(InvalidConfigError, match="no answer has ended"):
            rt.plan(1.0)
        with pytest.raises(InvalidConfigError, match="latency_s=-1"):
            rt.plan(-1, lengths=[(10, 20)])
    with pytest.raises(RuntimeClosedError):
        rt.plan(math.inf, lengths=[(10, 20)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(latency_bound="2"), "latency_s='2'"),
        (dict(latency_bound=math.nan), "latency_s=nan"),
        (dict(first_token_bound=True), "first_token_s=True"),
        (dict(lengths=[]), r"lengths=\[\]"),
        (dict(lengths=[(10,)]), r"lengths=\[\(10,\)\]"),
        (dict(lengths=[(1, 2, 3)]), "whole numbers of 1 to 16,777,216 and 1 to 131,072"),
        (dict(lengths=[5]), "whole numbers of 1 to 16,777,216 and 1 to 131,072"),
        (dict(lengths=[(1.9, 5.7)]), "whole numbers of 1 to 16,777,216 and 1 to 131,072"),
        (dict(lengths=[(3, 0)]), "whole numbers of 1 to 16,777,216 and 1 to 131,072"),
        (dict(lengths=[(10**6, 5)]), "up to 1000005 .* do not fit in a context of"),
        # Distributions of these lengths would take the memory of the machine.
        (dict(lengths=[(5, 200_000)]), "whole numbers of 1 to 16,777,216 and 1 to 131,072"),
        (dict(lengths=[(10**9, 5)]), "whole numbers of 1 to 16,777,216 and 1 to 131,072"),
        (dict(lengths=[(10**30, 5)]), "whole numbers of 1 to 16,777,216 and 1 to 131,072"),
        (dict(max_pause_s=math.nan), "max_pause_s=nan"),
        (dict(max_wait_s=-1.0), "max_wait_s=-1.0"),
        (dict(max_wait_s="soon"), "max_wait_s='soon'"),
        (dict(max_wait_s=10**400), "max_wait_s=10000"),
        (dict(token_bound=10**400), "token_s=10000"),
    ],
    ids=str,
)
def test_arguments_are_checked(loaded: Runtime, arguments: dict[str, Any], message: str):
    with pytest.raises(InvalidConfigError, match=message):
        loaded.plan(**{"lengths": [(10, 20)], **arguments})
    assert loaded.plan(None, lengths=np.array([[10, 20]]), adopt=False).num_lengths == 1


def test_lengths_may_come_from_an_iterator(loaded: Runtime):
    """It is read once: the plan is made of all of its answers, and knows how many there were."""
    given = [10, 12, 9], [20, 5, 7]
    plan = loaded.plan(None, lengths=zip(*given, strict=True), adopt=False)
    wanted = loaded.plan(None, lengths=list(zip(*given, strict=True)), adopt=False)
    assert plan.num_lengths == 3 and plan.schedule == wanted.schedule


@pytest.fixture(scope="module")
def loaded(measured: tuple[list, Path]):
    with Runtime(tiny_llama(), **OPTIONS) as rt:
        rt.load_step_times(measured[1])
        yield rt


@pytest.mark.release
def test_rules_divide_only_devices_that_can_move():
    """Groups of stages stay as they are, so that WAA-M's rule would have no effect."""
    devices = jax.devices()
    mesh = DeviceGroups(
        StagePlan.of([1, 1], devices=devices), StagePlan.of([1, 1], devices=devices[2:])
    )
    with (
        Runtime(tiny_llama(), mesh=mesh, policy="exegpt_waa_c", **OPTIONS) as rt,
        pytest.raises(InvalidConfigError, match="cannot move between the groups; pass policies="),
    ):
        rt.plan(lengths=[(10, 20)], policies=("waa_m",))


class _Watching(ExecutorWrapper):
    """Notes whether all was compiled when each step was submitted."""

    def __init__(self, inner: Any):
        super().__init__(inner)
        self.was_warm: list[bool] = []

    def submit(self, plan: StepPlan) -> StepHandle:
        self.was_warm.append(self.inner.is_warm)
        return self.inner.submit(plan)


@pytest.mark.release
def test_steps_are_timed_when_all_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A first start compiles behind its requests, and its times are kept for all later ones."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    watching = WrapAll(_Watching)
    options = OPTIONS | dict(warmup="background", wrap_executor=watching)
    with Runtime(tiny_llama(num_layers=3), **options) as rt:
        rt.plan(1e3, lengths=[(10, 20)])
        [executor] = watching.executors
        assert executor.was_warm and all(executor.was_warm)


@pytest.mark.release
@pytest.mark.parametrize(("policy", "num_classes"), some([("auto", 1), ("vllm_like", 0)]))
def test_slots_are_reserved_where_the_order_heeds_bounds(
    measured: tuple[list, Path], policy: str, num_classes: int
):
    """Under first come, first served a request with a bound of its own is refused, alone."""
    bounded = [replace(params, latency_bound=100.0) for params in PARAMS]
    with Runtime(tiny_llama(), policy=policy, **OPTIONS) as rt:
        rt.load_step_times(measured[1])
        for each in rt.generate(PROMPTS, bounded):
            assert isinstance(each.error, UnheededBoundError) == (not num_classes)
        rt.generate(PROMPTS, PARAMS)
        plan = rt.plan(adopt=False)
        assert len(plan.classes) == num_classes and bool(plan.reserved_slots) == bool(num_classes)


@pytest.mark.release
def test_a_model_in_stages_has_step_times_of_its_own(
    measured: tuple[list, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Those of the whole model and of another stage plan are refused; answers keep their tokens."""
    answers, whole = measured
    own = tmp_path / "stages.json"
    with Runtime(tiny_llama(), mesh=StagePlan.of([1, 1]), **OPTIONS) as rt:
        monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))  # without kept step times
        with pytest.raises(InvalidProfileError, match="device.stages"):
            rt.load_step_times(whole)
        rt.measure_step_times(rounds=1).save(own)
        assert rt.plan(math.inf, lengths=[(10, 20)], policies=("rra",)).answers_per_s > 0
        assert [one.token_ids for one in rt.generate(PROMPTS, PARAMS)] == answers
    with Runtime(tiny_llama(), mesh=StagePlan.of([1, 1], micro_batches=4), **OPTIONS) as rt:
        with pytest.raises(InvalidProfileError, match="device.micro_batches is 2, not 4"):
            rt.load_step_times(own)


@pytest.mark.release
def test_step_times_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first plan measures; later ones use the same times, and so find the same figures."""
    with Runtime(tiny_llama(), **OPTIONS) as rt:
        monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))  # without kept step times
        first = rt.plan(math.inf, lengths=[(10, 20)])
        assert len(list((tmp_path / "profiles").iterdir())) == 1
        num_steps = rt.stats().num_steps
        again = rt.plan(math.inf, lengths=[(10, 20)])
        assert again.answers_per_s == first.answers_per_s
        assert rt.stats().num_steps == num_steps


def _lowest_s(rt: Runtime) -> float:
    with pytest.raises(InfeasibleBoundError) as refused:
        rt.plan(1e-9, lengths=[(10, 20)])
    return refused.value.lowest["latency_s"]
