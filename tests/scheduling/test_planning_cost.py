"""The work of planning a step grows neither with the requests that wait nor with long contexts.

It is counted in calls of Python functions, which no other work on the machine changes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.predictor import LengthBuckets
from jaxserve.scheduling.iteration.continuous import Unified
from jaxserve.scheduling.policy import MAX_ADMITTED, Policy
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.scheduler import Scheduler
from tests.common.tiers import some
from tests.engine.any_text import AnyText
from tests.scheduling.simulated import engine_of, request_of

pytestmark = pytest.mark.fast

CONFIG = EngineConfig(num_pages=41, max_slots=8, max_context=256, max_step_tokens=64, page_size=16)
LONG = EngineConfig(
    num_pages=30_000, max_slots=8, max_context=400_000, max_step_tokens=256, page_size=16
)
# Of planning the next token of an answer.
MAX_CALLS_A_ROW = 24
_BUCKETS = LengthBuckets.equal_width(64, 4)


def _engine(policy: str | Policy, config: EngineConfig) -> Engine:
    return engine_of(policy, config, reads_context=False)


def _request(number: int, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 64) -> Request:
    weights = np.ones(4)
    weights[number % 4] += 8
    prediction = LengthPrediction(_BUCKETS, weights / weights.sum())
    params = dict(max_tokens=max_tokens, ignore_eos=True)
    return request_of(str(number), prompt, float(number), prediction, **params)


def _calls(
    engine: Engine,
    num_steps: int,
    of: Any = Scheduler.plan,
    do: Callable[[Engine], Any] = Engine.step,
) -> int:
    """Return the most calls that planning one of the next steps made, or resumed.

    Args:
      of: the function whose calls are counted.
      do: what is done `num_steps` times.
    """
    plan, counts = of.__code__, []
    depth = num = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth, num
        if event in ("call", "return"):
            entered = 1 if event == "call" else -1
            if depth or frame.f_code is plan:
                depth += entered
                num += entered > 0
                if not depth:
                    counts.append(num)
                    num = 0

    sys.setprofile(count)
    try:
        for _ in range(num_steps):
            do(engine)
    finally:
        sys.setprofile(None)
    return max(counts)


@pytest.mark.parametrize("policy", some(["auto", "vllm_like", "s3", "s3_oracle", "pensieve"], 2))
def test_ten_times_as_many_wait(policy: str):
    """The slots are full and the memory limits admission, with 200 waiting as with 2,000."""
    _check_grows_little(
        lambda num_waiting: _with_waiting(
            _engine(policy, CONFIG),
            num_waiting,
            lambda number: _request(number, tuple(range(1, 30 + number % 50))),
        ),
        num_steps=40,
    )


def _with_waiting(
    engine: Engine, num_waiting: int, request: Callable[[int], Request], num_steps: int = 1
) -> Engine:
    """Return the engine with requests of these numbers, after some steps."""
    for number in range(num_waiting):
        engine.add(request(number))
    for _ in range(num_steps):
        engine.step()
    return engine


def _check_grows_little(
    made: Callable[[int], Engine],
    sizes: tuple[int, int] = (200, 2_000),
    num_steps: int = 10,
    of: Any = Scheduler.plan,
) -> None:
    """Check that the calls of a step hardly depend on the size for which an engine is made."""
    found = [_calls(made(size), num_steps, of) for size in sizes]
    assert found[1] < 1.5 * found[0] + 200, found


@pytest.mark.release
def test_ten_times_as_many_wait_with_a_grammar():
    """A step looks at the answers that it computes, and a request at its own."""
    found = []
    params = SamplingParams(max_tokens=64, ignore_eos=True, regex=".*")
    for num_waiting in (200, 2_000):
        engine = engine_of("auto", CONFIG, parts={"grammars": AnyText()}, reads_context=False)
        for number in range(num_waiting - 1):
            engine.add(replace(_request(number), params=params))
        of_add = _calls(
            engine, 1, Engine.add, lambda e: e.add(replace(_request(9_999), params=params))
        )
        found.append((of_add, _calls(engine, 40, Engine.step)))
    (add, step), (more_add, more_step) = found
    assert more_add < 1.5 * add + 50 and more_step < 1.5 * step + 200, found


@pytest.mark.release
def test_ten_times_as_many_wait_where_only_those_with_a_bound_may_run():
    """As many run as may, there is memory for all, and none of those that wait has a bound."""
    config = replace(CONFIG, num_pages=500)
    policy = replace(PRESETS["auto"], name="few", iteration=Unified(max_running=4))
    _check_grows_little(
        lambda num_waiting: _with_waiting(_engine(policy, config), num_waiting, _request),
        num_steps=20,
    )


def _bounded(number: int) -> Request:
    params = SamplingParams(max_tokens=64, ignore_eos=True, latency_bound=1e6)
    return replace(_request(number), params=params, arrival_s=0.0)


def _with_bounds(num_waiting: int) -> Engine:
    """Return an engine whose requests have bounds that are far off."""
    engine = _with_waiting(_engine("auto", CONFIG), num_waiting, _bounded, num_steps=3)
    assert len(engine.scheduler.waiting) > num_waiting - 20
    return engine


@pytest.mark.release
def test_ten_times_as_many_wait_with_bounds_that_are_far_off():
    """A step looks only at those that may be too late."""
    _check_grows_little(_with_bounds, num_steps=40, of=Engine.step)


@pytest.mark.release
def test_four_times_as_many_wait_when_requests_with_bounds_arrive():
    """The simulations of the queue that decide which are refused serve several arrivals each."""
    found = []
    for num_waiting in (1_000, 4_000):
        engine = _with_bounds(num_waiting)
        requests = [_bounded(number) for number in range(num_waiting, num_waiting + 128)]
        found.append(0)

        def count(frame: FrameType, event: str, _: Any) -> None:
            found[-1] += event == "call"

        sys.setprofile(count)
        try:
            for request in requests:
                engine.add(request)
        finally:
            sys.setprofile(None)
    assert found[1] < 1.5 * found[0] + 200, found


@pytest.mark.parametrize("policy", some(["auto", "vllm_like", "pensieve"]))
def test_an_answer_that_goes_on_costs_few_calls(policy: str):
    """Beside a prompt that is being computed, with memory for all that run."""
    config = EngineConfig(
        num_pages=5_000, max_slots=200, max_context=40_000, max_step_tokens=300, page_size=16
    )
    found = []
    for num_answers in (20, 180):
        engine = _engine(policy, config)
        for number in range(num_answers):
            engine.add(_request(number, tuple(range(number, number + 3))))
        while any(
            not each.output for each in (*engine.scheduler.running, *engine.scheduler.waiting)
        ):
            engine.step()
        engine.add(_request(1000, tuple(range(30_000))))
        engine.step()
        assert len(engine.scheduler.running) == num_answers + 1
        found.append(_calls(engine, 10))
    assert found[1] - found[0] < MAX_CALLS_A_ROW * 160, found


@pytest.mark.parametrize("policy", some(["auto", "vllm_like", "s3", "pensieve"]))
def test_a_long_context_is_not_walked_over_each_step(policy: str):
    """One sequence of 12,500 pages runs and as long a one waits; a step touches its own pages."""

    def made(num_tokens: int) -> Engine:
        def request(number: int) -> Request:
            if number >= 2:
                return _request(number)
            prompt = tuple(range(number, num_tokens + number))
            return _request(number, prompt, max_tokens=1000)

        config = replace(LONG, num_pages=2 + num_tokens // 10)
        # What begins with the long one is computed once.
        return _with_waiting(_engine(policy, config), 5, request, num_steps=4)

    _check_grows_little(made, (4_000, 200_000))


@pytest.mark.release
@pytest.mark.parametrize("policy", some(["pensieve", "vllm_like", "s3", "auto"]))
def test_long_contexts_that_begin_end_and_leave_the_pool(policy: str):
    """The pool holds two; a step computes 32 pages, whether a prompt has 125 or 1,250."""
    found = []
    for num_tokens in (2_000, 20_000):
        config = EngineConfig(
            num_pages=2 + num_tokens // 7,
            max_slots=8,
            max_context=100_000,
            max_step_tokens=512,
            page_size=16,
        )
        engine = _engine(policy, config)
        most = 0
        for number in range(3):
            engine.add(_request(number, tuple(range(number, num_tokens + number)), max_tokens=2))
            while engine.has_work:
                most = max(most, _calls(engine, 1))
        found.append(most)
    assert found[1] < 1.5 * found[0] + 200, found


ONE_GROUP = [name for name, policy in PRESETS.items() if policy.num_device_groups == 1]


@pytest.mark.parametrize(
    "policy", some(ONE_GROUP, *map(ONE_GROUP.index, ("auto", "pensieve", "s3")))
)
def test_a_step_admits_few(policy: str):
    """There is room for all of 200 requests at once; they begin over several steps, and all end."""
    config = EngineConfig(num_pages=2_000, max_slots=200, max_context=64, max_step_tokens=8192)
    engine = _engine(policy, config)
    for number in range(200):
        engine.add(_request(number, max_tokens=3))
    num_admitted, num_ended = [], 0
    while engine.has_work:
        num_before = len(engine.scheduler.waiting)
        num_ended += sum(each.sequence.finish_reason is not None for each in engine.step())
        num_admitted.append(num_before - len(engine.scheduler.waiting))
    assert max(num_admitted) <= MAX_ADMITTED and sum(num_admitted) == 200 == num_ended


@pytest.mark.parametrize("policy", some(["pensieve", "auto"], 1))
def test_a_long_prompt_that_waits_for_a_slot_while_its_pages_come_from_the_host(policy: str):
    """Its pages were evicted by a prompt of the same length; a few of them come with each step."""
    found, came = [], []
    for num_pages in (600, 6_000):
        config = EngineConfig(
            num_pages=num_pages * 5 // 4,
            num_host_pages=4 * num_pages,
            max_slots=1,
            max_context=16 * num_pages,
            max_step_tokens=4_096,
            page_size=16,
            restore="prefetch",
        )
        engine = _engine(policy, config)
        prompts = [tuple(range(first, 16 * num_pages + first - 100)) for first in range(2)]
        for number in range(2):
            engine.add(_request(number, prompts[number], max_tokens=2))
            while engine.has_work:
                engine.step()
        for number, prompt in enumerate(((7, 8, 9), prompts[0]), 2):
            engine.add(_request(number, prompt, max_tokens=500))
        for _ in range(3):
            engine.step()
        before = engine.stats.num_pages_prefetched
        found.append(_calls(engine, 20))
        came.append(engine.stats.num_pages_prefetched - before)
    assert min(came) > 0, came
    assert found[1] < 1.5 * found[0] + 200, found
