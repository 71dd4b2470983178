"""A runtime's schedule follows the lengths of its answers; the preset `exegpt` plans by itself."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import BoundNotMetError, InfeasibleBoundError, InvalidConfigError
from jaxserve.planning.schedules import LatencyBounds
from jaxserve.sharding import make_groups
from jaxserve.testing.tiny import OPTIONS, random_prompts, tiny_llama
from tests.common.waiting import until

PROMPTS = random_prompts(70, longest=20)
SHORT = [SamplingParams(max_tokens=2 + i % 3, ignore_eos=True) for i in range(len(PROMPTS))]
LONG = [SamplingParams(max_tokens=16 + i % 9, ignore_eos=True) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the step times that a runtime of the preset measured at its start."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSERVE_CACHE", str(folder))
        with Runtime(tiny_llama(), policy="exegpt", **OPTIONS) as rt:
            assert rt.stats().num_steps == 0 and rt.stats().plan is None
    [path] = (folder / "profiles").glob("steps-*.json")
    assert json.loads(path.read_text())["decode_s"]
    return folder


@pytest.fixture(scope="module")
def answers() -> list[tuple[int, ...]]:
    """The tokens of long answers under the default policy."""
    with Runtime(tiny_llama(), **OPTIONS) as rt:
        return _tokens(rt, LONG)


def _tokens(rt: Runtime, params: Sequence[SamplingParams]) -> list[tuple[int, ...]]:
    return [one.token_ids for one in rt.generate(PROMPTS, params)]


@pytest.mark.release
def test_the_preset_plans_by_itself(answers, cache: Path, monkeypatch: pytest.MonkeyPatch):
    """After 64 answers there is a schedule; stats and report name it, its bound and figures."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(cache))
    with Runtime(tiny_llama(), policy="exegpt", latency_bound=50, **OPTIONS) as rt:
        assert rt.stats().plan is None and rt.report().policy == "exegpt"
        assert _tokens(rt, LONG) == answers
        until(lambda: rt.stats().plan is not None, 60)
        plan = rt.stats().plan
        assert plan is not None and plan.latency_bound_s == 50 and plan.keeps_bounds
        assert plan.num_lengths >= 64 and rt.stats().num_plans == 1
        assert rt.report().policy == f"exegpt ({plan.name})"
        assert rt.report().figures()["plan"]["answers_per_s"] == plan.answers_per_s
        assert _tokens(rt, LONG) == answers
        rt.check_integrity()


def _tight_bound(rt: Runtime) -> float:
    """Return half as much again as without a bound, or what is feasible on a busy machine."""
    free = rt.plan(adopt=False)
    try:
        return rt.plan(1.5 * free.latency_s, adopt=False).latency_bound_s
    except InfeasibleBoundError as error:
        return 1.05 * error.lowest["latency_s"]


@pytest.mark.release
def test_a_plan_follows_the_lengths_while_requests_run(
    answers, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Longer answers than planned, with cancellations: another schedule, and the same tokens.

    If the bound becomes infeasible, that is said, and what misses it least serves, which may be the
    present schedule.
    """
    monkeypatch.setenv("JAXSERVE_CACHE", str(cache))
    [path] = (cache / "profiles").glob("steps-*.json")
    with Runtime(tiny_llama(), **OPTIONS) as rt, caplog.at_level(logging.WARNING):
        rt.load_step_times(path)
        rt.generate(PROMPTS, SHORT)
        plan = rt.plan(_tight_bound(rt))
        assert rt.stats().num_plans == 1 and plan.keeps_bounds
        pending = [rt.submit(*each) for each in zip(PROMPTS, LONG, strict=True)]
        cancelled = [rt.submit(PROMPTS[0], SamplingParams(max_tokens=60)) for _ in range(10)]
        for each in cancelled[::2]:
            each.cancel()
        assert [each.result(120).token_ids for each in pending] == answers
        assert len([each.result(120) for each in cancelled]) == 10
        for _ in range(60):
            now = rt.stats().plan
            assert now is not None
            if rt.stats().num_plans > 1 or not now.keeps_bounds:
                break
            rt.generate(PROMPTS, LONG)
        assert rt.stats().num_plans > 1 or not now.keeps_bounds
        assert now.max_answer_tokens > plan.max_answer_tokens
        if not now.keeps_bounds:
            assert now.lowest["latency_s"] > plan.latency_bound_s
            assert "no schedule keeps the bounds" in caplog.text
        assert _tokens(rt, LONG) == answers
        rt.check_integrity()


@pytest.mark.release
def test_a_plan_that_is_not_adapted_stays(cache: Path, monkeypatch: pytest.MonkeyPatch):
    """With adapt=False no answers change the schedule."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(cache))
    with Runtime(tiny_llama(), policy="exegpt", **OPTIONS) as rt:
        plan = rt.plan(math.inf, lengths=[(10, 2)], adapt=False)
        rt.generate(PROMPTS, LONG)
        rt.generate(PROMPTS, LONG)
        assert rt.stats().plan == plan and rt.stats().num_plans == 1


@pytest.mark.release
def test_a_request_with_a_bound_of_its_own(answers, cache: Path, monkeypatch: pytest.MonkeyPatch):
    """It is refused alone where it cannot be in time; else it is served, and the plan knows it."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(cache))
    with Runtime(tiny_llama(), policy="exegpt", **OPTIONS) as rt:
        assert _tokens(rt, LONG) == answers
        with pytest.raises(BoundNotMetError, match="latency_bound=1e-06"):
            rt.generate(PROMPTS[0], SamplingParams(max_tokens=60, latency_bound=1e-6))
        bounded = [replace(params, latency_bound=100.0) for params in LONG]
        assert _tokens(rt, bounded) == answers
        plan = rt.plan()
        [(each, expected_s)] = plan.classes
        assert each.bounds.latency_s == 100.0 and expected_s["latency_bound"] < 100
        mixed = [each if i % 2 else LONG[i] for i, each in enumerate(bounded)]
        assert _tokens(rt, mixed) == answers
        rt.check_integrity()


def test_a_bound_needs_a_policy_that_keeps_it():
    """The option is refused with another policy, and when it is not above 0."""
    with pytest.raises(InvalidConfigError, match="policy='exegpt'"):
        Runtime(tiny_llama(), latency_bound=2.0, **OPTIONS)
    with pytest.raises(InvalidConfigError, match="first_token_bound=1, token_bound=2 is kept by"):
        Runtime(tiny_llama(), first_token_bound=1, token_bound=2, **OPTIONS)
    for given in (dict(latency_bound=-1), dict(token_bound=True), dict(first_token_bound="1")):
        [(name, bound)] = given.items()
        with pytest.raises(InvalidConfigError, match=f"{name}={bound!r} is not allowed"):
            Runtime(tiny_llama(), policy="exegpt", **given, **OPTIONS)


@pytest.mark.release
def test_the_preset_keeps_bounds_on_tokens(cache: Path, monkeypatch: pytest.MonkeyPatch):
    """Bounds of each kind are options of the runtime, too."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(cache))
    bounds = dict(latency_bound=50.0, first_token_bound=40.0, token_bound=30.0)
    with Runtime(tiny_llama(), policy="exegpt", **bounds, **OPTIONS) as rt:
        rt.generate(PROMPTS, SHORT)
        until(lambda: rt.stats().plan is not None, 60)
        plan = rt.stats().plan
        assert plan is not None and plan.keeps_bounds
        assert plan.bounds == LatencyBounds.of(**bounds)


@pytest.mark.release
def test_the_preset_plans_on_two_device_groups_too(answers, tmp_path, monkeypatch):
    """There the schedule is workload-aware; a policy that does not plan refuses the option."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    mesh = make_groups(encode=1, decode=1)
    # Few slots, since steps of every number of them are measured.
    options = OPTIONS | dict(max_slots=2, mesh=mesh, policy="exegpt", latency_bound=50)
    with Runtime(tiny_llama(), **options) as rt:
        assert rt.stats().plan is None and rt.report().policy == "exegpt"
        assert _tokens(rt, LONG) == answers
        until(lambda: rt.stats().plan is not None, 60)
        plan = rt.stats().plan
        assert plan is not None and plan.family == "waa" and plan.latency_bound_s == 50
        assert _tokens(rt, LONG) == answers
        rt.check_integrity()
    with pytest.raises(InvalidConfigError, match="policy='exegpt'"):
        Runtime(tiny_llama(), mesh=mesh, policy="exegpt_waa_c", latency_bound=50, **OPTIONS)
