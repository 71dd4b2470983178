"""Answers with a grammar share what a step may propose."""

from __future__ import annotations

import gc

import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.scheduling.presets import PRESETS
from tests.engine.any_text import AnyText

pytestmark = pytest.mark.fast


def test_those_that_run_share_the_proposals_of_a_step():
    """Twelve requests, of which the page pool holds three; the nine that wait get no share."""
    config = EngineConfig(num_pages=19, page_size=4, max_slots=16, max_context=60, num_proposed=8)
    clock, source = VirtualClock(), AnyText()
    executor = SimulatedExecutor(config, clock, answer_length=lambda *_: 99)
    engine = Engine(executor, PRESETS["orca"], clock, grammars=source)
    params = SamplingParams(max_tokens=8, regex="a")
    prompt = tuple(range(1, 17))
    for i in range(12):
        engine.add(Request(id=f"{i}", prompt=prompt, params=params, arrival_s=0.0))
    seen = []
    while engine.has_work:
        source.shares.clear()
        engine.step()
        if source.shares:
            assert len(engine.scheduler.running) == len(source.shares) == 3
            seen.append(tuple(source.shares))
    # Five proposals and three rows fill a tile of tokens; an answer's last token needs none.
    assert config.num_proposed_beside(3) == 5
    assert set(seen) == {(2, 2, 1), (1, 1, 1)} and seen.count((2, 2, 1)) == 4 * 5


def test_cancelled_ones_do_not_stay():
    """Those that wait and are cancelled, again and again, are dropped when others come."""
    config = EngineConfig(num_pages=19, page_size=4, max_slots=2, max_context=60)
    clock, source = VirtualClock(), AnyText()
    engine = Engine(SimulatedExecutor(config, clock), PRESETS["orca"], clock, grammars=source)
    params = SamplingParams(max_tokens=8, regex="a")
    for i in range(500):
        (sequence,) = engine.add(Request(id=f"{i}", prompt=(1,), params=params, arrival_s=0.0))
        if i % 5:
            engine.scheduler.end(sequence, "cancelled")
    gc.collect()
    assert source.num_matchers < 100 + 2 * 64
    while engine.has_work:
        engine.step()
    del sequence
    gc.collect()
    assert source.num_matchers <= 64


def test_an_answer_that_nothing_binds_any_more_is_computed_in_loops():
    """As after a budget of thinking; one that restarts is bound again, and read token by token."""
    config = EngineConfig(
        num_pages=40, page_size=4, max_slots=2, max_context=120, max_decode_iterations=8
    )
    clock, source = VirtualClock(), AnyText(most=5)
    executor = SimulatedExecutor(config, clock, answer_length=lambda *_: 99)
    engine = Engine(executor, PRESETS["vllm_like"], clock, grammars=source)
    params = SamplingParams(max_tokens=45, max_thinking_tokens=5)
    (sequence,) = engine.add(Request(id="a", prompt=(1, 2), params=params, arrival_s=0.0))
    while len(sequence.output) < 20:
        engine.step()
    assert source.num_masks == 5 and not sequence.awaits_tokens
    engine.drain()
    engine.scheduler.restart(sequence, keeps_output=False)
    assert sequence.awaits_tokens
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    assert (len(sequence.output), sequence.finish_reason) == (45, "length")
    assert source.num_masks == 10 and num_steps < 20
