"""Pages of a program wait on the device for the tool that it calls, for a time that is learned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.engine.engine import Engine
from jaxserve.scheduling.cache_ttl import ToolTime
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.retention import DeviceOnly
from jaxserve.scheduling.sequence import Phase, Sequence
from tests.scheduling.simulated import engine_of, request_of, run_to_end

pytestmark = pytest.mark.fast

# Room for a turn of nine pages, held, beside one other request of as many.
CONFIG = EngineConfig(num_pages=20, page_size=8, max_slots=4, max_context=152, max_step_tokens=256)
HELD_S = PRESETS["cache_ttl"].retention.holding.default_s
NO_HOLD = replace(PRESETS["cache_ttl"], retention=DeviceOnly())


def _turn(tokens: tuple[int, ...], number: int, now_s: float) -> Request:
    request = request_of(f"turn {number}", tokens, now_s, max_tokens=8)
    return replace(request, conversation_id="program")


def _other(number: int, now_s: float) -> Request:
    return request_of(f"other {number}", (100 + number,) * 64, now_s, max_tokens=8)


def _after_a_turn(policy: object) -> tuple[Engine, VirtualClock, Sequence]:
    """Return an engine that has served a program's first turn."""
    clock = VirtualClock()
    engine = engine_of(policy, CONFIG, clock)  # type: ignore[arg-type]
    (turn,) = engine.add(_turn(tuple(range(64)), 0, 0.0))
    run_to_end(engine)
    return engine, clock, turn


@pytest.mark.parametrize("policy, num_beside", [("cache_ttl", 1), (NO_HOLD, 2)])
def test_requests_leave_the_pages_of_a_waiting_tool_call(policy, num_beside: int):
    """They wait rather than take them, so that the next turn computes its new tokens alone."""
    engine, clock, turn = _after_a_turn(policy)
    others = [each for i in range(4) for each in engine.add(_other(i, clock.now()))]
    engine.step()
    assert sum(each.slot is not None for each in others) == num_beside
    while others[1].phase is not Phase.FINISHED:
        engine.step()
    (after,) = engine.add(_turn(turn.known_tokens + (7, 8), 1, clock.now()))
    run_to_end(engine)
    assert (after.kv.num_found == 64) == (policy == "cache_ttl")


def test_pages_are_free_once_the_tool_has_taken_too_long():
    """Others take them then, and the program's next turn begins anew."""
    engine, clock, turn = _after_a_turn("cache_ttl")
    clock.advance_to(clock.now() + HELD_S + 0.1)
    others = [each for i in range(4) for each in engine.add(_other(i, clock.now()))]
    engine.step()
    assert sum(each.slot is not None for each in others) == 2
    run_to_end(engine)
    (after,) = engine.add(_turn(turn.known_tokens + (7, 8), 1, clock.now()))
    run_to_end(engine)
    assert after.kv.num_found < 64


def test_a_turn_counts_from_its_program():
    """It passes requests that came after its first turn; a head start is limited."""
    engine, clock, turn = _after_a_turn("cache_ttl")
    clock.advance_to(100.0)
    waits = engine.add(_other(0, 100.0))
    waits += engine.add(_turn(turn.known_tokens + (7, 8), 1, 101.0))
    assert list(engine.scheduler.waiting) == waits[::-1]
    clock.advance_to(1000.0)
    late = engine.add(_turn((5,) * 64, 2, 1000.0))
    assert list(engine.scheduler.waiting) == [*waits[::-1], *late]


def test_the_time_is_that_of_the_most_gain():
    """Pauses that end late are not waited for, and none is where little is saved."""
    tools = ToolTime(num_known=5)
    rng = np.random.default_rng(0)
    pauses = [*rng.uniform(0.5, 1.0, 80), *rng.uniform(60.0, 90.0, 20)]
    assert 0.9 < tools.hold_s(pauses, saved_s=4.0) <= 1.0
    assert tools.hold_s(pauses, saved_s=1e4) == max(pauses)
    assert tools.hold_s(pauses, saved_s=0.3) == 0.0
    assert tools.hold_s(pauses[:4], saved_s=0.0) == tools.default_s
