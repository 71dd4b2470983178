"""What a pool that shrinks preempts, on a simulated device."""

from __future__ import annotations

import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from tests.scheduling.simulated import engine_of, request_of, run_to_end

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
    engine, sequences = engine_of("orca", CONFIG, clock), []
    for name in "abcd":
        sequences += engine.add(request_of(name, tuple(range(1, 21)), max_tokens=20))
        clock.advance_to(clock.now() + 1.0)
        engine.step()
    engine.drain()
    assert engine.scheduler.running == sequences
    engine.resize(31)  # 10 pages for each sequence that is reserved to its end
    assert engine.scheduler.running == sequences[:3]
    engine.resize(11)
    assert engine.scheduler.running == sequences[:1]
    run_to_end(engine)
    assert {len(sequence.output) for sequence in sequences} == {20}
