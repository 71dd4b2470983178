"""How often requests come decides how long decode loops are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.scheduling.iteration.continuous import decode_iterations
from jaxserve.scheduling.queues import Arrivals
from tests.scheduling.simulated import engine_of, request_of


def _noted(times_s: list[float], *, is_busy: bool = True) -> Arrivals:
    arrivals = Arrivals()
    for time_s in times_s:
        arrivals.note(time_s, is_busy=is_busy)
    return arrivals


def test_the_rate_falls_while_none_comes():
    """Twenty arrivals, one each half second: the newest 16 count, over the time since the first."""
    arrivals = _noted([0.5 * i for i in range(20)])
    assert arrivals.rate(9.5) == pytest.approx(2.0)
    assert arrivals.rate(2.0 + 75.0) == pytest.approx(15 / 75.0)


@pytest.mark.parametrize(
    ("times_s", "is_busy"),
    [([], True), ([1.0], True), ([1.0, 1.001, 1.002, 1.003], True), ([1.0, 2.0, 3.0], False)],
    ids=["none", "one", "a batch", "one after the other"],
)
def test_arrivals_for_which_nobody_waits_are_none(times_s, is_busy):
    """Neither a batch nor requests that find the device idle make loops shorter."""
    assert _noted(times_s, is_busy=is_busy).rate(4.0) == 0.0


@pytest.mark.parametrize(
    ("rate", "iteration_s", "num_running", "wanted"),
    [(1.5, 0.026, 4, 2), (1.5, 0.026, 64, 6), (0.05, 0.026, 4, 8), (1000.0, 0.1, 1, 1)],
)
def test_a_loop_costs_those_that_run_and_those_that_come_the_least(
    rate, iteration_s, num_running, wanted
):
    """sqrt(B s / (1.5 r)) / t iterations, worked out by hand, of 8 at most."""
    step = _step(num_running, (rate, iteration_s))
    assert decode_iterations(step, heeds_arrivals=True) == wanted
    assert decode_iterations(step) == 8
    assert decode_iterations(_step(num_running, None), heeds_arrivals=True) == 8


def _step(num_running: int, arrivals: tuple[float, float] | None) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(max_decode_iterations=8),
        has_waiting=False,
        decoding=[None] * num_running,
        expected_arrivals=lambda: arrivals,
    )


@pytest.mark.parametrize(("policy", "shortest"), [("auto", 1), ("vllm_like", 8)])
def test_policies_of_our_own_heed_arrivals(policy, shortest):
    """Three requests, one each two seconds, while steps take 0.4 s."""
    config = EngineConfig(page_size=16, num_pages=400, max_slots=4, max_context=512)
    clock = VirtualClock()
    engine = engine_of(policy, config, clock, reads_context=False)
    params = dict(max_tokens=400, ignore_eos=True)
    for number in range(3):
        engine.add(request_of(str(number), (1, 2), clock.now(), **params))
        until_s = clock.now() + 2.0
        while clock.now() < until_s:
            engine.step()
            clock.advance_to(clock.now() + 0.4)
    loops = [step for step in engine.recorder.steps if step.kind == "decode loop"]
    assert min(step.num_iterations for step in loops) == shortest
