"""`Runtime.is_ready`: whether a first request would wait for a compilation."""

from __future__ import annotations

import jax
import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.steps.step_function import COMPILED_EVENT, LOADED_EVENT
from jaxserve.testing import OPTIONS, tiny_llama
from tests.common.compiling import held_back
from tests.common.waiting import until


def test_a_runtime_is_ready_when_its_first_steps_are_compiled():
    """Until the smallest mixed step is compiled it is not; requests wait for it, too."""
    # No other test has steps of this size, so that they are compiled here.
    options = OPTIONS | {"max_slots": 5, "max_step_tokens": 128}
    with Runtime(tiny_llama(), **options):
        pass  # measures the largest steps, which a constructor waits for
    options |= {"warmup": "background"}
    with held_back("mixed_body") as compiling, Runtime(tiny_llama(), **options) as rt:
        assert compiling.has_begun.wait(60)
        assert not rt.is_ready()
        pending = rt.submit([1, 2], SamplingParams(max_tokens=2))
        assert not pending.future.done() and not rt.is_ready()
        compiling.go_on.set()
        until(rt.is_ready, 60)
        assert pending.result().finish_reason == "length"


@pytest.mark.release
def test_first_requests_do_not_compile():
    """Once it is ready, requests of every length compile nothing, greedy or drawn."""
    options = OPTIONS | {"max_slots": 6, "max_step_tokens": 128, "warmup": "background"}
    with Runtime(tiny_llama(), **options) as rt:
        until(rt.is_ready, 60)
        for temperature in (0.0, 1.0):
            for length in (1, 70):
                params = SamplingParams(max_tokens=3, temperature=temperature)
                rt.generate([1] * length, params)
        assert rt.stats().num_compilations == 0


@pytest.mark.release
def test_a_warmup_for_one_request_leaves_the_prompt_to_its_own_call():
    """Only the step of the prompt's own size is compiled, by the call, and no other size of it."""
    options = OPTIONS | {"max_slots": 7, "max_step_tokens": 128}
    with Runtime(tiny_llama(), **options):
        pass  # measures the largest steps, which a constructor waits for
    options |= {"warmup": "one_request"}
    made = []

    def on_event(event: str, duration_secs: float, **about: str | int) -> None:
        if event in (COMPILED_EVENT, LOADED_EVENT):
            made.append(about["name"])

    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        with Runtime(tiny_llama(), **options) as rt:
            until(rt.is_ready, 60)
            assert "decode_loop" in made and "mixed_body" not in made
            made.clear()
            rt.generate([1, 2], SamplingParams(max_tokens=3))
    finally:
        jax.monitoring.unregister_event_duration_listener(on_event)
    assert made.count("mixed_body") == 1 and "decode_loop" not in made


def test_without_a_warmup_it_is_ready_at_once():
    """Executables are then compiled at their first use, as was asked for."""
    with Runtime(tiny_llama(), **OPTIONS) as rt:
        assert rt.is_ready()
