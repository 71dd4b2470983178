"""Forced lengths end an answer, and do not change a policy's plans."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.request import Request
from jaxserve.engine.engine import Engine
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.scheduling.presets import PRESETS
from jaxserve.testing import RecordingExecutor
from jaxserve.testing.traces import random_config, random_requests
from tests.common.tiers import some


def _with_length(request: Request, length: int) -> Request:
    params = replace(request.params, forced_length=length, max_tokens=None, n=1)
    return replace(request, params=params, stop_token_ids=())


def _run(policy: str, seed: int, lengths: list[int], num_plans: float = math.inf):
    """Return the schedule part of the plans, how many there were at the first end, and lengths.

    The lengths are those of the answers, and those that the context has room for.

    Args:
      num_plans: plans after which the run is cut off.
    """
    rng = random.Random(seed)
    config = random_config(rng)
    requests = random_requests(rng, config)
    clock = VirtualClock()
    executor = RecordingExecutor(SimulatedExecutor(config, clock))
    engine = Engine(executor, PRESETS[policy], clock)
    sequences = [
        sequence
        for request, length in zip(requests, lengths, strict=False)
        for sequence in engine.add(_with_length(request, length))
    ]
    plans_at_first_end = None
    while engine.has_work and len(executor.plans) < num_plans:
        engine.step()
        clock.advance_to(engine.idle_until_s or 0.0)
        if plans_at_first_end is None and any(s.times.finished_s is not None for s in sequences):
            plans_at_first_end = len(executor.plans)
    plans = [
        (p.rows, p.num_iterations, p.page_updates, p.releases, p.handovers) for p in executor.plans
    ]
    room = [config.max_length - len(s.request.prompt) for s in sequences]
    return plans, plans_at_first_end, [len(s.output) for s in sequences], room


@pytest.mark.parametrize("policy", some(sorted(PRESETS.keys() - {"oracle", "s3_oracle"}), 0))
def test_plans_do_not_depend_on_forced_lengths(policy):
    """Until the first answer has ended, plans equal those of endless answers."""
    for seed in range(20):
        rng = random.Random(f"lengths {seed}")
        lengths = [rng.randint(1, 12) for _ in range(20)]
        planned, until, outputs, room = _run(policy, seed, lengths)
        assert until
        endless, *_ = _run(policy, seed, [10_000] * 20, until)
        assert planned[:until] == endless[:until], f"seed {seed}"
        assert outputs == [min(n, m) for n, m in zip(lengths, room, strict=False)], f"seed {seed}"
