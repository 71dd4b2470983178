"""Continuous batching with a limit on running sequences, on random traces and by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.execution.step_cost import FlatCost
from jaxserve.planning import simulate
from jaxserve.planning.simulator import Ended
from jaxserve.scheduling.iteration.continuous import Unified
from jaxserve.scheduling.iteration.rra import RRA
from jaxserve.scheduling.presets import PRESETS
from jaxserve.testing import check_policy
from jaxserve.workload import WorkloadItem

CONFIG = EngineConfig(
    num_pages=60, max_slots=6, max_context=120, max_step_tokens=64, max_decode_iterations=4
)
SECOND = FlatCost(per_iteration_s=1.0, per_token_s=0.0)


def _items(seed: int, num: int, *, bounded: bool = False) -> list[WorkloadItem]:
    rng = random.Random(seed)
    return [
        WorkloadItem(
            prompt_token_ids=(1,) * rng.randint(1, 30),
            num_output_tokens=(num_output := rng.randint(1, 40)),
            max_tokens=num_output,
            arrival_s=rng.uniform(0, 60),
            sampling=SamplingParams(latency_bound=1e5 if bounded and i % 3 == 0 else None),
        )
        for i in range(num)
    ]


class _Watch:
    """Adopts shapes at random, and checks after every step that the limit in force is obeyed."""

    def __init__(self, seed: int | None):
        self._rng = None if seed is None else random.Random(seed)
        self._most = CONFIG.max_slots
        self.num_over = 0

    def after_step(self, engine: Engine, ended: Sequence[Ended], now_s: float) -> None:
        bulk = [s for s in engine.scheduler.running if not s.request.has_bounds]
        shape = engine.scheduler.policy.iteration
        if isinstance(shape, Unified) and shape.max_running is not None:
            # More than the limit only go on from before it was adopted.
            assert len(bulk) <= max(shape.max_running, self._most)
            self.num_over += len(bulk) > shape.max_running
        self._most = len(bulk)
        if self._rng is not None and self._rng.random() < 0.1:
            engine.adopt(
                self._rng.choice(
                    [
                        Unified(max_running=self._rng.randint(1, 6)),
                        Unified(),
                        RRA(encode_batch=self._rng.randint(1, 4), decode_iterations=6),
                    ]
                )
            )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("policy", ["auto", "vllm_like"])
def test_a_limit_is_obeyed_and_may_change_while_requests_run(policy: str, seed: int):
    """RRA, limits and none replace each other at random: nothing is lost, no limit is exceeded."""
    items = _items(seed, 40, bounded=policy == "auto")
    watch = _Watch(seed)
    done = simulate(items, PRESETS[policy], CONFIG, SECOND, pilot=watch, progress=False).completions
    assert [len(c.token_ids) for c in done] == [each.num_output_tokens for each in items]
    assert all(c.error is None for c in done)


@pytest.mark.parametrize("limit", [1, 3, 6, 99])
def test_at_most_so_many_run(limit: int):
    """As many as the limit run where there are enough, and never more."""
    policy = replace(PRESETS["vllm_like"], iteration=Unified(max_running=limit))
    items = [replace(each, arrival_s=0.0) for each in _items(1, 30)]
    run = simulate(items, policy, CONFIG, SECOND, pilot=_Watch(None), progress=False)
    assert max(step.num_running for step in run.steps) == min(limit, CONFIG.max_slots)


@pytest.mark.release
def test_a_limit_keeps_the_tokens():
    """Random traces with cancellations and preemptions: tokens are those of a request alone."""
    checked = check_policy(
        replace(PRESETS["auto"], iteration=Unified(max_running=2)), num_traces=15
    )
    assert checked.num_requests


def test_a_bounded_request_does_not_wait_for_the_limit():
    """One runs, one waits; a request with a bound of its own is admitted beside the first."""
    items = [
        WorkloadItem(prompt_token_ids=(1,) * 3, num_output_tokens=50, arrival_s=at, sampling=each)
        for at, each in (
            (0.0, SamplingParams()),
            (0.0, SamplingParams()),
            (5.0, SamplingParams(latency_bound=250.0)),
        )
    ]
    policy = replace(PRESETS["auto"], iteration=Unified(max_running=1))
    done = simulate(items, policy, CONFIG, SECOND, progress=False).completions
    admitted = [c.timing.admitted_s or 0.0 for c in done]
    assert admitted[2] < 15 and admitted[1] >= 50


def test_a_limit_is_at_least_one():
    """Zero is refused."""
    with pytest.raises(InvalidConfigError, match="max_running=0"):
        Unified(max_running=0)
