"""The simulated executor's fast path agrees with its slow path."""

from __future__ import annotations

import random
from typing import final

import numpy as np
import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Answer
from jaxserve.engine.engine import Engine
from jaxserve.engine.requests import RequestBuilder
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.execution.step_cost import FlatCost, StepWork
from jaxserve.scheduling.plan import Admission, Row, StepPlan
from jaxserve.scheduling.presets import PRESETS
from jaxserve.workload import WorkloadItem
from tests.common.tiers import some

pytestmark = pytest.mark.fast

CONFIG = EngineConfig(
    page_size=4, num_pages=60, max_slots=6, max_context=64, max_step_tokens=32, num_host_pages=20
)


def _admission(slot: int, num_tokens: int) -> Admission:
    prompt = tuple(range(1, num_tokens + 1))
    params = SamplingParams(max_tokens=50)
    request = Request(id=str(slot), prompt=prompt, params=params, arrival_s=0.0)
    return Admission(slot, request, 0, np.asarray(prompt, np.int32), num_tokens + 50)


def test_groups_have_clocks_of_their_own():
    """Plans of two groups overlap in time; those of one group run one after the other."""
    clock = VirtualClock()
    executor = SimulatedExecutor(
        CONFIG, clock, cost=FlatCost(per_iteration_s=1.0, per_token_s=0.0), reads_context=False
    )
    prompts = [_admission(slot, 4) for slot in range(3)]
    rows = [(Row(slot, slot, 0, 4, max_new_tokens=1),) for slot in range(3)]
    first = executor.submit(StepPlan(index=0, admissions=(prompts[0], prompts[2]), rows=rows[0]))
    beside = executor.submit(StepPlan(index=1, admissions=(prompts[1],), rows=rows[1], group=1))
    second = executor.submit(StepPlan(index=2, rows=rows[2]))
    assert not first.is_ready()
    first.collect()
    assert (clock.now(), beside.is_ready(), second.is_ready()) == (1.0, True, False)
    beside.collect()
    assert clock.now() == 1.0
    second.collect()
    assert clock.now() == 2.0


def test_a_row_beyond_its_slot_is_inert_and_one_that_fell_short_goes_on():
    """A sampling row ends at the newest token, whatever end the plan had."""
    executor = SimulatedExecutor(CONFIG, VirtualClock(), accepted=lambda *_: 1)
    pages = tuple((0, index, 1 + index) for index in range(4))
    loop = executor.submit(
        StepPlan(
            index=0,
            admissions=(_admission(0, 5),),
            page_updates=pages,
            rows=(Row(0, 0, 4, 1, max_new_tokens=8),),
            num_iterations=8,
            window_size=1,
        )
    ).collect()
    assert loop.num_tokens.tolist() == [1]
    # 8 tokens were planned, so the next row begins at 12; the slot has 6 and computes position 5.
    late = executor.submit(StepPlan(index=1, rows=(Row(0, 0, 12, 1, max_new_tokens=1),))).collect()
    beyond = executor.submit(StepPlan(index=2, rows=(Row(0, 0, 6, 4, max_new_tokens=0),))).collect()
    assert (late.num_tokens.tolist(), beyond.num_tokens.tolist()) == ([1], [0])


@final
class Recorded:
    """A cost that stores its arguments."""

    def __init__(self) -> None:
        self.work: list[tuple[int, tuple[int, ...]]] = []

    def host_s(self, plan: StepPlan) -> float:
        return 0.0

    def device_s(self, work: StepWork) -> float:
        self.work.append((work.prefilled, work.decoded))
        return 1.0 + 0.01 * work.prefilled + 0.1 * sum(work.decoded)


def _served(policy: str, seed: int, **executor) -> tuple:
    """Return steps, tokens and ends of random requests."""
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
        answers[-1].begin(engine.add(answers[-1].request), engine.weights)
    while engine.has_work:
        engine.step()
    engine.scheduler.check_integrity()
    ends = [(s.output, s.finish_reason, s.times.finished_s) for a in answers for s in a.sequences]
    return cost.work, ends


@pytest.mark.parametrize(
    "policy", some(["orca", "vllm_like", "pensieve", "fastertransformer"], 1, 2)
)
def test_loops_at_once_come_to_the_same_as_one_by_one(policy):
    """Both paths have the same tokens, ends and positions attended to."""
    for seed in range(5):
        one_by_one = _served(policy, seed, answer_length=lambda *_: 10**9)
        assert _served(policy, seed) == one_by_one, f"seed {seed}"
        assert any(len(decoded) > 1 for _, decoded in one_by_one[0])
