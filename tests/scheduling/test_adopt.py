"""Another iteration shape while requests run: none is lost, and each gets the same tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.scheduling.iteration.continuous import IterationLevel, Unified
from jaxserve.scheduling.iteration.request_level import Concurrent, Static
from jaxserve.scheduling.iteration.rra import RRA
from jaxserve.scheduling.presets import PRESETS
from jaxserve.testing import Trace
from tests.common.tiers import seeds, some
from tests.scheduling.simulated import engine_of, request_of

SHAPES = [
    RRA(encode_batch=1, decode_iterations=2),
    RRA(encode_batch=4, decode_iterations=9, decode_batch=5.0),
    IterationLevel(),
    Static(),
    Unified(chunk_tokens=5),
    Concurrent(),
]


@seeds(40)
@pytest.mark.parametrize("name", some(["exegpt_rra", "vllm_like", "pensieve"], 2))
def test_the_same_tokens_whatever_shapes_follow_each_other(seeds, name):
    """Shapes change with steps in flight, in the middle of prompts and of decode phases."""
    num_adopted = 0
    for seed in seeds:
        trace = Trace(seed, with_faults=seed % 4 == 0)
        rng = random.Random(f"adopt {seed}")
        clock = VirtualClock()
        engine = trace.engine(PRESETS[name], clock=clock)
        arriving = list(trace.requests)
        sequences = []
        while arriving or engine.has_work:
            if arriving and rng.random() < 0.4:
                sequences += engine.add(arriving.pop(0))
            if rng.random() < 0.3:
                engine.adopt(rng.choice(SHAPES))
                num_adopted += engine.has_work
            engine.step()
            engine.scheduler.check_integrity()
            if engine.has_work and engine.idle_until_s is not None:
                clock.advance_to(engine.idle_until_s)
        ends = {
            (s.request.id, s.sample_index): (tuple(s.output), s.finish_reason) for s in sequences
        }
        wanted = trace.expected(trace.requests)
        assert ends == {key: (w.output, w.finish_reason) for key, w in wanted.items()}, (
            f"seed {seed}"
        )
    assert num_adopted > 250


def test_new_settings_hold_from_the_next_step_on():
    """A decode phase with many iterations to go gives way to the next encode phase."""
    config = EngineConfig(num_pages=40, max_slots=4, max_context=999, max_step_tokens=64)
    endless = replace(PRESETS["exegpt_rra"], iteration=RRA(encode_batch=1, decode_iterations=10**6))
    engine = engine_of(endless, config)
    (first,) = engine.add(request_of("first"))
    for _ in range(3):
        engine.step()
    (second,) = engine.add(request_of("second"))
    for _ in range(3):
        engine.step()
    assert second.slot is None
    engine.adopt(RRA(encode_batch=1, decode_iterations=2))
    for _ in range(4):
        engine.step()
    assert None not in (first.slot, second.slot)
    policy = engine.scheduler.policy
    assert policy == replace(endless, iteration=RRA(encode_batch=1, decode_iterations=2))
