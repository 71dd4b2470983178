"""Which of the requests with latency bounds that wait are refused, and when."""

from __future__ import annotations

import random

import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.scheduling.bounds import Deferred, too_late
from jaxserve.scheduling.kv.manager import KVManager
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.slack import Pace
from jaxserve.testing.traces import random_prediction
from tests.common.tiers import some
from tests.scheduling.simulated import request_of

CONFIG = EngineConfig(num_pages=41, max_slots=2, max_context=256, max_step_tokens=64, page_size=16)


def _scheduler() -> Scheduler:
    clock, policy = VirtualClock(), PRESETS["auto"]
    kv = KVManager(CONFIG, policy, clock.now)
    return Scheduler(policy, clock, kv, None, lambda: None)


def _request(rng: random.Random, number: int, arrival_s: float) -> Request:
    bounds = {
        "latency_bound": rng.choice([None, rng.uniform(5, 100)]),
        "first_token_bound": rng.choice([None, rng.uniform(1, 100)]),
        "token_bound": rng.choice([None, None, rng.uniform(0.1, 3)]),
    }
    most = rng.randint(1, 60)
    prompt = tuple(range(rng.randint(1, 190)))
    return request_of(str(number), prompt, arrival_s, max_tokens=most, **bounds)


@pytest.mark.parametrize("seed", some(range(20), 0, 1))
def test_they_are_those_of_a_look_at_all(seed: int):
    """While paces change, predictions come late, and requests begin, end and are cancelled."""
    rng, scheduler, deferred = random.Random(seed), _scheduler(), Deferred()
    waiting, now_s, num_refused = [], 0.0, 0
    pace_s = 0.05
    for number in range(300):
        now_s += rng.choice([0.1, 1.0])
        if rng.random() < 0.6:
            samples = scheduler.add(_request(rng, number, now_s))
            waiting.append(samples)
            assert deferred.add(scheduler, samples, None, now_s) is None
        if waiting and rng.random() < 0.2:
            prediction = random_prediction(rng)
            if prediction is not None:
                scheduler.expect(rng.choice(waiting)[0], prediction)
        if waiting and rng.random() < 0.1:
            scheduler.end(rng.choice(waiting)[0], "cancelled")
        if rng.random() < 0.1:
            scheduler.plan((0,))
        pace_s *= rng.uniform(0.8, 1.25)
        newest = Pace(iteration_s=pace_s, decode_s=pace_s / 2, prefill_s=pace_s * rng.uniform(1, 2))
        known = newest if scheduler.running else None
        waiting = [each for each in waiting if each[0] in set(scheduler.waiting)]
        waiting = [each for each in waiting if each[0].times.admitted_s is None]
        expected = []
        for samples in waiting:
            error = too_late(samples, scheduler.lengths, scheduler.config, known, now_s)
            expected += [(samples[0], str(error))] if error is not None else []
        found = []
        for sequence, error in deferred.late(scheduler, lambda pace=newest: pace, now_s):
            found.append((sequence, str(error)))
            scheduler.end(sequence, "error", error)
        assert found == expected
        num_refused += len(found)
    assert num_refused > 10
