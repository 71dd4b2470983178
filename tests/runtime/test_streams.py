"""A reader of an answer's pieces does not wait longer than its timeout."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest

from jaxserve.core.request import Completion, Sample, Timing
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece, PieceSink
from jaxserve.engine.pending import Pending, aread, read, submitted
from jaxserve.runtime.turn_client import ServiceTurnClient

CONSTRAINED = SamplingParams(regex="a")
LAST = Piece(text="!", token_ids=(3,), finish_reason="stop")


def _start(sink: PieceSink) -> Pending[Completion]:
    """Send the last piece but no completion, as when a replica dies in between."""
    sink(LAST)
    return Pending("r", Future(), lambda _: None)


def test_a_completion_that_never_comes_is_given_up():
    pieces = read(_start, 1, timeout_s=0.05)
    assert next(pieces) == LAST
    with pytest.raises(TimeoutError):
        next(pieces)


def test_a_completion_that_never_comes_is_given_up_in_asyncio():
    async def consume() -> list[Piece]:
        seen = []
        with pytest.raises(TimeoutError):
            async for piece in aread(_start, SamplingParams(), timeout_s=0.05):
                seen.append(piece)
        return seen

    assert asyncio.run(consume()) == [LAST]


@pytest.mark.parametrize("way", ["stream", "turn"])
def test_a_grammar_is_compiled_beside_the_event_loop(way: str):
    """The loop goes on while a submission waits."""

    async def run() -> None:
        asyncio.get_running_loop().call_soon(may_submit.set)
        if way == "stream":
            assert [piece async for piece in aread(start, CONSTRAINED)] == [LAST]
        else:
            await client.aanswer([1], CONSTRAINED, conversation_id="c", timeout_s=5)

    def start(sink: PieceSink) -> Pending[Completion]:
        sink(LAST)
        return submit()

    def submit(*_: object, **__: object) -> Pending[Completion]:
        assert may_submit.wait(20), "the event loop is blocked"
        return Pending.ended(_ended())

    may_submit = threading.Event()
    client = ServiceTurnClient(
        submit, check_may_wait=lambda: None, max_prompt_tokens=lambda: 9, progress=False
    )
    asyncio.run(run())


def test_a_submission_that_nobody_awaits_is_cancelled():
    """A task that ends while its grammar is compiled leaves no request behind."""
    cancelled: list[str] = []
    is_here, may_submit = threading.Event(), threading.Event()

    def submit() -> list[Pending[Completion]]:
        is_here.set()
        assert may_submit.wait(20)
        return [Pending("r", Future(), cancelled.append)]

    async def run() -> None:
        task = asyncio.ensure_future(submitted(submit, [CONSTRAINED]))
        await asyncio.to_thread(is_here.wait, 20)
        task.cancel()
        await asyncio.sleep(0)
        may_submit.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert cancelled == ["r"]


def _ended() -> Completion:
    sample = Sample(text="!", token_ids=(3,), finish_reason="stop")
    return Completion(
        request_id="r", prompt_token_ids=(1,), samples=(sample,), timing=Timing(arrival_s=0.0)
    )
