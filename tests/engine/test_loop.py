"""The order in which an engine's thread delivers the tokens of a step."""

from __future__ import annotations

import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Answer
from jaxserve.engine.engine import Engine
from jaxserve.engine.loop import EngineLoop
from jaxserve.engine.requests import RequestBuilder
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.scheduling.presets import PRESETS

pytestmark = pytest.mark.fast


def test_first_tokens_are_delivered_before_those_of_running_answers():
    """A long prompt takes three steps, in the last of which an answer runs that began before it."""
    config = EngineConfig(
        page_size=4, num_pages=80, max_slots=4, max_context=64, max_step_tokens=16
    )
    clock = VirtualClock()
    engine = Engine(SimulatedExecutor(config, clock), PRESETS["vllm_like"], clock)
    builder = RequestBuilder(
        None,
        eos_token_ids=(),
        vocab_size=100,
        max_prompt_tokens=lambda: config.max_prompt_tokens,
        seed=0,
    )
    delivered: list[tuple[float, str]] = []

    def answer(name: str, num_tokens: int) -> Answer:
        prompt = list(range(1, 1 + num_tokens))
        request = builder.build(prompt, SamplingParams(max_tokens=12), 0.0)
        return Answer(request, sink=lambda _: delivered.append((clock.now(), name)))

    loop = EngineLoop(engine, clock, name="engine")
    answers = [answer("running", 2), answer("new", 40)]
    loop.submit(*answers)
    for each in answers:
        each.future.result(60)
    loop.close()
    first_s = next(now_s for now_s, name in delivered if name == "new")
    assert delivered[0] == (delivered[0][0], "running") and delivered[0][0] < first_s
    assert [name for now_s, name in delivered if now_s == first_s] == ["new", "running"]
