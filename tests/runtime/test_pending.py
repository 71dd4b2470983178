"""Ctrl-C while a call waits for its answers."""

from __future__ import annotations

import _thread
import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest

from jaxserve import Completion, Runtime, SamplingParams
from jaxserve.engine.pending import PendingRequest
from jaxserve.runtime.pending import Batch
from jaxserve.testing.tiny import OPTIONS, tiny_llama


@pytest.fixture(scope="module")
def completion() -> Completion:
    with Runtime(tiny_llama(), **OPTIONS) as rt:
        return rt.generate([1, 2], SamplingParams(max_tokens=2))


@pytest.mark.parametrize("has_ended", [False, True], ids=["cancelled", "ended"])
def test_ctrl_c_is_never_lost(completion, has_ended):
    """A cancelled answer tells of it; if all answers have ended meanwhile, it goes on."""
    (sample,) = completion.samples
    cut = replace(completion, samples=(replace(sample, finish_reason="cancelled"),))
    future: Future[Completion] = Future()

    def cancel(_: str) -> None:
        future.set_result(completion if has_ended else cut)

    batch = Batch.of([[1, 2]], None)
    timer = threading.Timer(0.05, _thread.interrupt_main)
    timer.start()
    waiting = [PendingRequest("a", future, cancel)]
    if has_ended:
        with pytest.raises(KeyboardInterrupt):
            batch.wait(waiting, progress=False)
    else:
        assert batch.wait(waiting, progress=False) == [cut]
    timer.join()
