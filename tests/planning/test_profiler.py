"""Profiling finds the actual step times and leaves the runtime unchanged."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from jaxserve import Runtime
from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError, InvalidProfileError, RuntimeClosedError
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.planning import StepTimes
from jaxserve.planning.profiler import measure
from jaxserve.planning.step_times import Curve
from jaxserve.testing.tiny import random_prompts, tiny_llama
from tests.planning.step_times import CONFIG, made_up

CONFIGS = [
    CONFIG,
    replace(CONFIG, num_pages=3, max_decode_iterations=1),
    EngineConfig(
        num_pages=9,
        max_slots=1,
        max_context=20,
        max_step_tokens=5,
        token_buckets=(2, 5),
        num_host_pages=1,
    ),
    EngineConfig(
        page_size=8, num_pages=9, max_slots=2, max_context=20, max_step_tokens=64, num_host_pages=1
    ),
    replace(CONFIG, has_encoder=True),
]


@pytest.mark.parametrize(
    "config", CONFIGS, ids=["roomy", "two pages", "one slot", "few tokens", "encoder"]
)
def test_finds_the_cost_that_was_simulated(config):
    """The table measured on a simulated device is the one with which it was simulated."""
    true, clock = made_up(config), VirtualClock()
    executor = SimulatedExecutor(config, clock, cost=true, reads_context=False)
    found = measure(executor, true.origin, clock, progress=False)
    for field in fields(true):
        if field.name in ("origin", "plan_s", "submit_s"):
            continue
        expected, got = getattr(true, field.name), getattr(found, field.name)
        if field.name == "move_s" and config.max_slots == 1:
            expected = 0.0  # there is no slot to which one could move
        if not isinstance(got, dict):
            assert got == pytest.approx(expected), field.name
            continue
        for size, value in got.items():
            if isinstance(value, Curve):
                for x, seconds in value.points:
                    assert seconds == pytest.approx(expected[size](x)), (field.name, size, x)
            else:
                assert value == pytest.approx(expected[size]), (field.name, size)
    assert found.plan_s + found.submit_s == pytest.approx(true.plan_s + true.submit_s)


@pytest.mark.parametrize("rounds", [0, -1, True, "x"])
def test_a_measurement_has_rounds(rounds):
    """Anything but a whole number of at least 1 is refused before a step runs."""
    executor = SimulatedExecutor(CONFIG, VirtualClock(), cost=made_up())
    with pytest.raises(InvalidConfigError, match=f"rounds={rounds!r} is not allowed"):
        measure(executor, made_up().origin, VirtualClock(), rounds=rounds, progress=False)


@pytest.mark.release
def test_measures_a_device_and_leaves_it_as_it_was(tmp_path):
    """It waits for running requests; answers before and after are equal; nothing compiles."""
    prompts = random_prompts(6, longest=40)
    params = SamplingParams(max_tokens=20)
    with Runtime(
        tiny_llama(), max_slots=4, max_step_tokens=64, page_size=8, strict=True, progress=False
    ) as runtime:
        before = [done.token_ids for done in runtime.generate(prompts, params)]
        pending = runtime.submit((1, 2, 3), SamplingParams(max_tokens=60, ignore_eos=True))
        times = runtime.measure_step_times(rounds=1)
        assert len(pending.result(timeout_s=0).token_ids) == 60
        assert [done.token_ids for done in runtime.generate(prompts, params)] == before
        assert all(times.loop_s[size] > 0 for size in runtime.config.slot_buckets)
        assert set(times.prefill_s) == set(runtime.config.token_buckets)
        assert times.plan_s > 0 and times.submit_s > 0
        times.save(tmp_path / "times.json")
        assert runtime.load_step_times(tmp_path / "times.json").decode_s == times.decode_s
    with pytest.raises(RuntimeClosedError):
        runtime.measure_step_times()
    with pytest.raises(InvalidProfileError, match="model.num_layers"):
        other = replace(times.origin, model={**times.origin.model, "num_layers": 3})
        StepTimes.load(tmp_path / "times.json", expected=other)
