"""What a pool that shrinks preempts, on a simulated device."""

from __future__ import annotations

import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.scheduling.presets import PRESETS

pytestmark = pytest.mark.fast

CONFIG = EngineConfig(
    page_size=4,
    num_pages=61,
    max_slots=4,
    max_context=40,
    max_step_tokens=64,
    max_decode_iterations=4,
)


def test_the_last_in_order_make_room():
    """A pool without room for all preempts the newest sequences, as few as it must."""
    clock = VirtualClock()
    engine = Engine(SimulatedExecutor(CONFIG, clock), PRESETS["orca"], clock)
    params, sequences = SamplingParams(max_tokens=20), []
    for name in "abcd":
        prompt = tuple(range(1, 21))
        sequences += engine.add(Request(id=name, prompt=prompt, params=params, arrival_s=0.0))
        clock.advance_to(clock.now() + 1.0)
        engine.step()
    engine.drain()
    assert engine.scheduler.running == sequences
    engine.resize(31)  # 10 pages for each sequence that is reserved to its end
    assert engine.scheduler.running == sequences[:3]
    engine.resize(11)
    assert engine.scheduler.running == sequences[:1]
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    assert {len(sequence.output) for sequence in sequences} == {20}
