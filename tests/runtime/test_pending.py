"""Ctrl-C while a call waits for its answers."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import pytest

from jaxserve import Completion, Runtime, SamplingParams
from jaxserve.core.errors import GenerationInterrupted
from jaxserve.engine.pending import Pending, PromptBatch
from jaxserve.testing.tiny import OPTIONS, tiny_llama
from tests.common.tiers import some


@pytest.fixture(scope="module")
def completion() -> Completion:
    with Runtime(tiny_llama(), **OPTIONS) as rt:
        return rt.generate([1, 2], SamplingParams(max_tokens=2))


@pytest.fixture
def ctrl_c() -> Iterator[threading.Timer]:
    """Ctrl-C in a moment, also where the process ignores it, as parallel workers of tests do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.05, _thread.interrupt_main)
    yield timer
    timer.cancel()
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("has_ended", some([False, True]), ids=["cancelled", "ended"])
def test_ctrl_c_raises_with_the_answers(completion, has_ended, ctrl_c):
    """A training loop never takes a cut answer for a whole one; what was answered is there."""
    (sample,) = completion.samples
    cut = replace(completion, samples=(replace(sample, finish_reason="cancelled"),))
    answer = completion if has_ended else cut
    future: Future[Completion] = Future()

    def cancel(_: str) -> None:
        future.set_result(answer)

    batch = PromptBatch.of([[1, 2]], None)
    waiting = [Pending("a", future, cancel)]
    ctrl_c.start()
    with pytest.raises(KeyboardInterrupt) as raised:
        batch.wait(waiting, progress=False)
    assert isinstance(raised.value, GenerationInterrupted)
    assert raised.value.completions == [answer]
    ctrl_c.join()
