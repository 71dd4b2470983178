"""Continuous batching with a limit on running sequences, on random traces and by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.planning import simulate
from jaxserve.planning.simulator import Ended
from jaxserve.scheduling.iteration.continuous import Unified
from jaxserve.scheduling.iteration.rra import RRA
from jaxserve.scheduling.presets import PRESETS
from jaxserve.workload import WorkloadItem
from tests.common.tiers import some
from tests.scheduling.simulated import SECOND, item_of

CONFIG = EngineConfig(
    num_pages=60, max_slots=6, max_context=120, max_step_tokens=64, max_decode_iterations=4
)


def _items(seed: int, num: int, *, bounded: bool = False) -> list[WorkloadItem]:
    rng = random.Random(seed)
    return [
        item_of(
            rng.randint(1, 40),
            rng.uniform(0, 60),
            num_prompt=rng.randint(1, 30),
            latency_bound=1e5 if bounded and i % 3 == 0 else None,
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


@pytest.mark.parametrize("seed", some(range(6), 0, 1))
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
