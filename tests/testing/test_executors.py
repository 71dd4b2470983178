"""Wrappers of executors do what they document, and change nothing else."""

from __future__ import annotations

import time
from functools import partial

import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import EngineFailedError, NumericalError
from jaxserve.core.request import Request
from jaxserve.engine.engine import Engine
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.scheduling.presets import PRESETS
from jaxserve.testing import (
    OPTIONS,
    FaultyExecutor,
    FreeCopiesExecutor,
    RecordingExecutor,
    SlowExecutor,
    WrapAll,
    random_prompts,
    tiny_llama,
)

CONFIG = EngineConfig(page_size=4, num_pages=40, max_slots=4, max_context=60, max_step_tokens=16)
PARAMS = SamplingParams(max_tokens=8)


def _served(wrap=lambda executor: executor) -> tuple[list, object]:
    """Serve two requests, one after the other; return them and the wrapped executor."""
    clock = VirtualClock()
    executor = wrap(SimulatedExecutor(CONFIG, clock))
    engine = Engine(executor, PRESETS["orca"], clock)
    sequences = []
    for name in "ab":
        request = Request(id=name, prompt=(1, 2, 3), params=PARAMS, arrival_s=0.0)
        sequences += engine.add(request)
        while engine.has_work:
            engine.step()
    return sequences, executor


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [sequence.output for sequence in _served()[0]]


def test_a_recording_executor_keeps_plans_and_results(expected):
    """They are in order; all other members are those of the wrapped executor."""
    sequences, executor = _served(RecordingExecutor)
    assert [sequence.output for sequence in sequences] == expected
    assert [plan.index for plan in executor.plans] == list(range(len(executor.plans)))
    assert len(executor.results) == len(executor.plans)
    assert sum(int(result.num_tokens.sum()) for result in executor.results) == 16
    assert executor.config is CONFIG and executor.inner.config is CONFIG


def test_a_slow_executor_takes_its_time(expected):
    """Each step takes the requested time, also while the device runs."""
    begin_s = time.perf_counter()
    sequences, executor = _served(partial(SlowExecutor, step_s=0.005))
    assert time.perf_counter() - begin_s > 0.02
    assert [sequence.output for sequence in sequences] == expected
    executor.step_s = 0.0


def test_a_faulty_executor_raises_from_a_step_on():
    """It raises its own error or the given one."""
    with pytest.raises(RuntimeError, match="fell over"):
        _served(partial(FaultyExecutor, raises_at=2))
    with pytest.raises(OSError, match="mine"):
        _served(partial(FaultyExecutor, raises_at=0, error=OSError("mine")))
    sequences, executor = _served(partial(FaultyExecutor, raises_at=1000))
    assert 2 < executor.num_submitted < 1000


def test_logits_that_are_not_finite_fail_the_rows_of_one_step(expected):
    """The request of that step fails, and the next one is answered."""
    (first, second), _ = _served(partial(FaultyExecutor, not_finite_at=1))
    assert isinstance(first.error, NumericalError) and first.output == expected[0][:1]
    assert second.output == expected[1]


def test_a_runtime_with_wrappers():
    """All wrappers work around a device; one makes the engine fail."""
    seen = WrapAll(lambda inner: RecordingExecutor(FreeCopiesExecutor(SlowExecutor(inner, 0.0))))
    with Runtime(tiny_llama(), wrap_executor=seen, **OPTIONS) as rt:
        rt.generate(random_prompts(3), PARAMS)
        rt.check_integrity()
        (executor,) = seen.executors
        assert executor.swap_costs is None and executor.params is not None
        assert len(executor.plans) == rt.stats().num_steps
    with Runtime(tiny_llama(), wrap_executor=partial(FaultyExecutor, raises_at=3), **OPTIONS) as rt:
        done = rt.generate(random_prompts(3), PARAMS)
        assert all(isinstance(each.error, EngineFailedError) for each in done)
