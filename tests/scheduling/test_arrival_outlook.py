"""When requests that arrive at a long queue are expected to begin."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.scheduling.bounds import ArrivalOutlook, outlooks
from jaxserve.scheduling.kv.manager import KVManager
from jaxserve.scheduling.order import DueFirst
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.scheduler import Scheduler
from tests.common.tiers import some
from tests.scheduling.simulated import request_of

CONFIG = EngineConfig(num_pages=41, max_slots=4, max_context=256, max_step_tokens=64, page_size=16)


def _scheduler() -> Scheduler:
    clock, policy = VirtualClock(), replace(PRESETS["vllm_like"], order=DueFirst())
    kv = KVManager(CONFIG, policy, clock.now)
    return Scheduler(policy, clock, kv, None, lambda: None)


def _request(rng: random.Random, number: int) -> Request:
    bound_s = rng.choice([None, rng.uniform(1, 200)])
    most = rng.randint(1, 60)
    prompt = tuple(range(rng.randint(1, 100)))
    return request_of(str(number), prompt, number / 100, max_tokens=most, latency_bound=bound_s)


@pytest.mark.parametrize(("num_requests", "error"), some([(250, 0.0), (3_000, 0.02)]))
def test_it_is_about_that_of_a_new_simulation(num_requests: int, error: float):
    """It is exactly that while few wait; the share by which it is wrong is of the whole queue."""
    rng, scheduler, arrivals = random.Random(0), _scheduler(), ArrivalOutlook()
    for number in range(num_requests):
        samples = scheduler.add(_request(rng, number))
        if number == 100:
            assert scheduler.plan((0,)) is not None
        if number < num_requests - 100 and number % 100:
            continue
        found = arrivals.of(scheduler, samples, 0.1, set())
        queue = outlooks(scheduler, 0.1)
        expected = queue[samples[0].request.id]
        last = max(each.ends_in_s or 0.0 for each in queue.values())
        assert found.num_tokens == expected.num_tokens
        assert found.begins_in_s == pytest.approx(expected.begins_in_s, rel=0, abs=error * last)
        assert found.ends_in_s == pytest.approx(expected.ends_in_s, rel=0, abs=error * last)
