"""A thread-safe facade of several engines on simulated devices loses and repeats no request."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest

from jaxserve.core.clock import VirtualClock, WallClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import (
    EngineFailedError,
    InvalidRequestError,
    QueueFullError,
    RuntimeClosedError,
)
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Answer, Piece
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.predictor import LengthBuckets, Refinement
from jaxserve.runtime.replicas import Replicas
from jaxserve.scheduling.presets import get_policy
from jaxserve.testing import FaultyExecutor, SlowExecutor
from tests.common.waiting import until

CONFIG = EngineConfig(page_size=4, num_pages=20, max_slots=4, max_context=60, max_step_tokens=16)
WAIT_S = 30
Wrap = Callable[[Any], Any]


@contextmanager
def _replicas(
    num_replicas: int, last: Wrap = lambda executor: executor, max_waiting: int | None = None
) -> Iterator[Replicas]:
    """Return replicas, of which the last one's executor is wrapped."""
    executors = [SimulatedExecutor(CONFIG, VirtualClock()) for _ in range(num_replicas)]
    executors[-1] = last(executors[-1])
    sized = [(executor, None) for executor in executors]
    replicas = Replicas(
        sized, get_policy("auto"), WallClock(), RuntimeOptions(max_waiting=max_waiting)
    )
    try:
        yield replicas
    finally:
        replicas.close()


def _answer(name: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int | None = 8) -> Answer:
    params = SamplingParams(max_tokens=max_tokens)
    return Answer(Request(id=name, prompt=prompt, params=params, arrival_s=0.0))


def _check_is_clean(replicas: Replicas) -> None:
    """Check that the router has no unfinished request, at the latest a moment after its answer."""
    until(lambda: not any(replicas.work))


def test_the_next_turn_goes_where_the_answer_is():
    """Prompts are shorter than a page, answers fill several; each has its own replica."""
    with _replicas(2) as replicas:

        def turn(name: str, prompt: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
            answer = _answer(name, prompt, max_tokens=20)
            replicas.submit(answer)
            token_ids = answer.future.result(WAIT_S).token_ids
            _check_is_clean(replicas)
            (home,) = (
                i
                for i, replica in enumerate(replicas.all)
                if name in {record.request_id for record in replica.engine.recorder.requests}
            )
            return home, (*prompt, *token_ids, 1)

        first, asked = zip(turn("a", (5, 6, 7)), turn("b", (8, 9)), strict=True)
        assert set(first) == {0, 1}
        again = [turn(f"again {i}", asked[i])[0] for i in (1, 0)]
        assert again == [first[1], first[0]]


def test_the_queue_is_bounded():
    """A call whose requests would be too many submits none; requests with a slot do not count."""
    with _replicas(1, lambda inner: SlowExecutor(inner, 0.01), max_waiting=3) as replicas:
        replicas.submit(*(_answer(f"first {i}", max_tokens=40) for i in range(3)))
        until(lambda: len(replicas.first.engine.scheduler.running) == 3)
        waiting = [_answer(f"later {i}", max_tokens=40) for i in range(3)]
        with replicas.first.loop.paused("keep"):  # none begins
            replicas.submit(*waiting[:2])
            with pytest.raises(
                QueueFullError, match=r"2 requests wait, and 2 more .* max_waiting=3"
            ):
                replicas.submit(waiting[2], _answer("too many"))
            replicas.submit(waiting[2])
            with pytest.raises(QueueFullError):
                replicas.submit(_answer("too many"))
            replicas.cancel("later 0")
        assert all(answer.future.result(WAIT_S).error is None for answer in waiting)
        replicas.submit(again := _answer("too many"))
        assert len(again.future.result(WAIT_S).token_ids) == 8
        _check_is_clean(replicas)


@pytest.mark.release
def test_a_refusal_looks_at_few_of_those_that_wait():
    """Many calls may be refused at once; those that begin or end make room for others."""
    looked_at = []
    for num_waiting in (500, 5_000):
        with _replicas(1, lambda inner: SlowExecutor(inner, 0.01), num_waiting) as replicas:
            with replicas.first.loop.paused("keep"):  # none begins
                replicas.submit(*(_answer(f"{i}", max_tokens=500) for i in range(num_waiting)))
                looked_at.append(0)

                def count(frame: FrameType, event: str, _: Any) -> None:
                    looked_at[-1] += event == "call" and frame.f_code.co_name == "waits"

                sys.setprofile(count)
                try:
                    for number in range(40):
                        with pytest.raises(QueueFullError):
                            replicas.submit(_answer(f"too many {number}"))
                finally:
                    sys.setprofile(None)
                for number in range(0, num_waiting, num_waiting // 5):
                    replicas.cancel(f"{number + num_waiting // 10}")
            until(lambda: len(replicas.first.engine.scheduler.running) >= 3)
            replicas.submit(*(_answer(f"again {i}") for i in range(5)))
    assert looked_at[1] < 1.5 * looked_at[0] + 200, looked_at


def test_what_is_claimed_is_not_given_to_another_call():
    """A call that awaits its prediction keeps its place and its id; then it is free for others."""
    with _replicas(1, max_waiting=1) as replicas:
        first, other = _answer("first"), _answer("other")
        with replicas.claimed([first.request]) as claimed:
            with pytest.raises(QueueFullError, match=r"1 requests wait, and 1 more"):
                replicas.submit(other)
            with pytest.raises(InvalidRequestError, match="'first' is still running"):
                replicas.submit(_answer("first"))
            replicas.submit_claimed(claimed, first)
            assert len(first.future.result(WAIT_S).token_ids) == 8
            replicas.submit(other)  # the claim ended with the submission
        assert len(other.future.result(WAIT_S).token_ids) == 8
        with pytest.raises(RuntimeError, match="changed its mind"):
            with replicas.claimed([_answer("third").request]):
                raise RuntimeError("changed its mind")
        replicas.submit(third := _answer("third"))
        assert len(third.future.result(WAIT_S).token_ids) == 8


def test_a_late_prediction_does_not_reach_a_new_request_with_the_same_id():
    """It comes when its own request has ended, and another with its id runs."""
    prediction = LengthPrediction(LengthBuckets((0, 4, 11, 60)), np.array([0.0, 1.0, 0.0]))
    with _replicas(1, lambda inner: SlowExecutor(inner, 0.01)) as replicas:
        first, second = _answer("same"), _answer("same", max_tokens=40)
        replicas.submit(first)
        first.future.result(WAIT_S)
        replicas.submit(second)
        replicas.expect(first, prediction)
        replicas.check_integrity()  # after whatever `expect` told the loop
        assert not second.future.done() and second.request.prediction is None
        replicas.cancel("same")
        assert second.future.result(WAIT_S).error is None
        _check_is_clean(replicas)


def test_a_late_prediction_reaches_a_request_that_has_not_begun():
    """It comes while a pause waits for running requests, and later ones are held back."""
    buckets = LengthBuckets((0, 4, 11, 60))
    prediction = LengthPrediction(buckets, np.array([0.0, 1.0, 0.0]))
    with _replicas(1, lambda inner: SlowExecutor(inner, 0.01)) as replicas:
        first, later = _answer("first", max_tokens=50), _answer("later")
        replicas.submit(first)

        def pause() -> None:
            with replicas.paused("finish"):
                pass

        thread = threading.Thread(target=pause)
        thread.start()
        time.sleep(0.05)
        replicas.submit(later)
        replicas.expect(later, prediction)
        replicas.expect(first, prediction)
        thread.join(WAIT_S)
        for answer in (first, later):
            assert answer.future.result(WAIT_S).predicted_tokens == 8
            assert answer.request.prediction is prediction
        _check_is_clean(replicas)


def test_many_threads_with_cancellations_and_pauses():
    """Every request ends once, with the tokens that it has alone; the seed is printed."""
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    prompts = [tuple(rng.choices(range(1, 50), k=rng.randint(1, 40))) for _ in range(60)]
    with _replicas(1) as alone:
        expected = [_answer(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
        alone.submit(*expected)
        wanted = [answer.future.result(WAIT_S).token_ids for answer in expected]
    with _replicas(3) as replicas:
        answers = [_answer(f"r{i}", prompt) for i, prompt in enumerate(prompts)]

        def ask(share: list[Answer]) -> None:
            for answer in share:
                replicas.submit(answer)

        threads = [threading.Thread(target=ask, args=(answers[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for i in range(0, 60, 5):
            replicas.cancel(f"r{i}")
            with replicas.paused("restart" if i % 2 else "finish"):
                assert not any(r.engine.scheduler.running for r in replicas.all if i % 2 == 0)
        for thread in threads:
            thread.join(WAIT_S)
        for i, answer in enumerate(answers):
            done = answer.future.result(WAIT_S)
            whole = done.finish_reason == "length"
            assert whole or i % 5 == 0
            assert done.token_ids == wanted[i][: len(done.token_ids)]
        _check_is_clean(replicas)
        for replica in replicas.all:
            assert replica.engine.recorder.requests
            replica.engine.scheduler.check_integrity()


def test_ids_are_unique_over_all_replicas():
    """A running id is refused on any replica, and is free when its answer is there."""
    with _replicas(2) as replicas:
        for _ in range(200):
            answer = _answer("same", max_tokens=1)
            replicas.submit(answer)
            answer.future.result(WAIT_S)
        running = _answer("same")
        with replicas.paused():  # in which no request ends
            replicas.submit(running)
            with pytest.raises(InvalidRequestError, match="still running"):
                replicas.submit(_answer("other"), _answer("same"))
        running.future.result(WAIT_S)
        _check_is_clean(replicas)


def test_what_waits_for_engines_is_refused_on_their_threads():
    """A call by a sink would deadlock; it raises, and the engine answers other requests."""
    threads: set[str] = set()
    with _replicas(2) as replicas:

        def look(piece: Piece) -> None:
            with pytest.raises(InvalidRequestError, match="on another thread"):
                replicas.outlook()
            with pytest.raises(InvalidRequestError, match="on another thread"), replicas.paused():
                pass
            threads.add(threading.current_thread().name)

        answer = Answer(_answer("r").request, sink=look)
        replicas.submit(answer)
        assert answer.future.result(WAIT_S).finish_reason == "length"
        assert threads == {"jaxserve-engine"}
        assert replicas.outlook() == {}


def test_a_failed_engine_is_not_hidden():
    """Its requests end with the error and later ones raise; the other's requests end as usual."""
    error = OSError("the device fell off the bus")
    with _replicas(2, partial(FaultyExecutor, raises_at=0, error=error)) as replicas:
        answers = [_answer(f"r{i}") for i in range(8)]
        replicas.submit(*answers)
        errors = [answer.future.result(WAIT_S).error for answer in answers]
        assert [type(error) for error in errors] == [type(None), EngineFailedError] * 4
        with pytest.raises(EngineFailedError, match="fell off the bus"):
            replicas.submit(_answer("later"))
        _check_is_clean(replicas)


def test_an_engine_that_fails_while_requests_are_handed_over():
    """The caller gets the error, and requests that were already submitted are cancelled."""
    with _replicas(2) as replicas:

        class Closing(tuple):
            """A prompt during whose routing the second engine is closed."""

            def __getitem__(self, index):
                replicas.all[1].loop.close()
                return super().__getitem__(index)

        answers = [_answer("r0", max_tokens=None), _answer("r1", Closing((1, 2, 3, 4, 5)), None)]
        with pytest.raises(RuntimeClosedError):
            replicas.submit(*answers)
        assert answers[0].future.result(WAIT_S).finish_reason in ("cancelled", "length")
        _check_is_clean(replicas)


def test_with_a_probe_alone_work_is_what_answers_are_long_in_general():
    """Every answer of the probe's training had 5 tokens; this answer could have 40."""
    buckets = LengthBuckets((0, 4, 5, 40))
    refinement = Refinement(buckets=buckets, marginal=np.array([0.0, 1.0, 0.0]))
    executor = SimulatedExecutor(CONFIG, VirtualClock(), refinement=refinement)
    with _replicas(1, lambda _: executor) as replicas:
        with replicas.paused():
            replicas.submit(_answer("a", (1, 2, 3), max_tokens=40))
            assert replicas.work == (3 + 5,)
