"""The simulated executor's short way against its long one."""

from __future__ import annotations

import random
from typing import final

import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.engine.answers import Answer
from jaxserve.engine.engine import Engine
from jaxserve.engine.requests import RequestBuilder
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.execution.step_cost import StepWork
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.presets import PRESETS
from jaxserve.workload import WorkloadItem

CONFIG = EngineConfig(
    page_size=4, num_pages=60, max_slots=6, max_context=64, max_step_tokens=32, num_host_pages=20
)


@final
class Recorded:
    """A cost that remembers what it was asked about."""

    def __init__(self) -> None:
        self.work: list[tuple[int, tuple[int, ...]]] = []

    def host_s(self, plan: StepPlan) -> float:
        return 0.0

    def device_s(self, work: StepWork) -> float:
        self.work.append((work.prefilled, work.decoded))
        return 1.0 + 0.01 * work.prefilled + 0.1 * sum(work.decoded)


def _served(policy: str, seed: int, **executor) -> tuple:
    """Steps, tokens and ends of random requests."""
    rng, clock, cost = random.Random(seed), VirtualClock(), Recorded()
    engine = Engine(
        SimulatedExecutor(CONFIG, clock, cost=cost, reads_context=False, **executor),
        PRESETS[policy],
        clock,
    )
    builder = RequestBuilder(
        None,
        eos_token_ids=(),
        vocab_size=100,
        max_prompt_tokens=lambda: CONFIG.max_prompt_tokens,
        seed=0,
    )
    answers = []
    for _ in range(24):
        item = WorkloadItem(
            prompt_token_ids=tuple(rng.choices(range(1, 100), k=rng.randint(1, 20))),
            num_output_tokens=rng.randint(1, 30),
            max_tokens=rng.choice((None, 30)),
        )
        answers.append(Answer(builder.build_item(item, 0.0)))
        answers[-1].sequences = engine.add(answers[-1].request)
    while engine.has_work:
        engine.step()
    engine.scheduler.check_integrity()
    ends = [(s.output, s.finish_reason, s.finished_s) for a in answers for s in a.sequences]
    return cost.work, ends


@pytest.mark.parametrize("policy", ["orca", "vllm_like", "pensieve", "fastertransformer"])
def test_loops_at_once_come_to_the_same_as_one_by_one(policy):
    """The same tokens, ends and positions attended to."""
    for seed in range(5):
        one_by_one = _served(policy, seed, answer_length=lambda *_: 10**9)
        assert _served(policy, seed) == one_by_one, f"seed {seed}"
        assert any(len(decoded) > 1 for _, decoded in one_by_one[0])
