"""The thread that runs the engine, and the door through which other threads reach it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import final

from jaxserve.core.clock import Clock
from jaxserve.core.errors import (
    DeviceMemoryError,
    EngineFailedError,
    InvalidRequestError,
    JaxserveError,
    RuntimeClosedError,
)
from jaxserve.core.request import Completion, Request
from jaxserve.engine.answers import Answer
from jaxserve.engine.device_errors import is_out_of_memory
from jaxserve.engine.engine import Engine
from jaxserve.workload.recorded import TraceWriter

_IDLE_POLL_S = 0.01


@final
class EngineLoop:
    """Owns an engine from one thread; `submit`, `cancel` and `close` are safe from any.

    Requests join at the next iteration, there is no batch window. Every answer's future is
    resolved exactly once, also when the loop fails or is closed. `trace` gets every request that
    began and ended, unless the loop itself failed.
    """

    def __init__(self, engine: Engine, clock: Clock, trace: TraceWriter | None = None):
        self._engine = engine
        self._clock = clock
        self._trace = trace
        self._changed = threading.Condition()
        self._arrived: list[Answer] = []
        self._cancelled: list[str] = []
        self._open_ids: set[str] = set()
        self._is_closing = False
        self._failure: JaxserveError | None = None
        self._answers: dict[str, Answer] = {}
        self._by_sequence: dict[int, Answer] = {}
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._thread.start()

    def submit(self, *answers: Answer) -> None:
        """Hand over answers that wait for their sequences; they start in the same iteration.

        Raises:
          RuntimeClosedError: the loop was closed.
          EngineFailedError: it failed before.
          InvalidRequestError: a request of that id is still running.
        """
        with self._changed:
            self._raise_if_over()
            taken = [a.request.id for a in answers if a.request.id in self._open_ids]
            if taken:
                raise InvalidRequestError(
                    f"a request with the id {taken[0]!r} is still running; give another id, or "
                    "none to have one made up"
                )
            self._open_ids.update(answer.request.id for answer in answers)
            self._arrived += answers
            self._changed.notify()

    def cancel(self, request_id: str) -> None:
        """End a request as it stands; unknown or finished ones are left alone."""
        with self._changed:
            self._cancelled.append(request_id)
            self._changed.notify()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the loop's thread from the engine for the length of the block.

        Waits until nothing runs; then whoever submits, cancels or closes waits for the block's end.

        Raises:
          RuntimeClosedError: the loop was closed.
          EngineFailedError: it failed before.
        """
        with self._changed:
            self._raise_if_over()
            while self._arrived or self._answers or self._engine.has_work:
                self._changed.wait(_IDLE_POLL_S)
                self._raise_if_over()
            yield

    def close(self) -> None:
        """Cancel what is left and stop the thread; returns when it has ended."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _raise_if_over(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closing:
            raise RuntimeClosedError("this runtime was closed; create a new one")

    # ---- on the loop's thread ----

    def _run(self) -> None:
        try:
            while self._take_in():
                self._iterate()
        except Exception as cause:
            self._fail(cause)
        else:
            self._cancel_all()

    def _take_in(self) -> bool:
        """Wait for work; False when closing."""
        with self._changed:
            while not (self._arrived or self._cancelled or self._is_closing or self._is_due()):
                self._engine.stats.end_busy_period()
                wake_s = self._engine.idle_until_s if self._engine.has_work else None
                self._changed.wait(None if wake_s is None else wake_s - self._clock.now())
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
            self._answers.update((answer.request.id, answer) for answer in arrived)
            if self._is_closing:
                return False
        for answer in arrived:
            answer.sequences = self._engine.add(answer.request)
            self._by_sequence.update((s.key, answer) for s in answer.sequences)
        for request_id in cancelled:
            self._cancel(request_id)
        return True

    def _is_due(self) -> bool:
        wake_s = self._engine.idle_until_s
        return self._engine.has_work and (wake_s is None or wake_s <= self._clock.now())

    def _iterate(self) -> None:
        if not self._engine.has_work:
            return
        scheduler = self._engine.scheduler
        touched: dict[str, Answer] = {}
        for news in self._engine.step():
            answer = self._by_sequence[news.sequence.key]
            answer.deliver(news.sequence, scheduler)
            touched[answer.request.id] = answer
        for answer in touched.values():
            self._settle(answer)

    def _cancel(self, request_id: str) -> None:
        answer = self._answers.get(request_id)
        if answer is not None:
            for sequence in answer.sequences:
                self._engine.scheduler.end(sequence, "cancelled")
            self._settle(answer)

    def _settle(self, answer: Answer) -> None:
        if answer.settle(partial(self._keep, answer.request)):
            for sequence in answer.sequences:
                del self._by_sequence[sequence.key]
            del self._answers[answer.request.id]
            with self._changed:
                self._open_ids.discard(answer.request.id)

    def _keep(self, request: Request, completion: Completion) -> None:
        self._engine.recorder.request_ended(completion)
        if self._trace is not None:
            self._trace.append(request, completion)

    def _cancel_all(self) -> None:
        """For closing: everyone gets what there is; who had not begun, an error."""
        for request_id, answer in list(self._answers.items()):
            if answer.sequences:
                self._cancel(request_id)
        self._end_all(RuntimeClosedError("the runtime was closed before this request began"))

    def _fail(self, cause: Exception) -> None:
        if isinstance(cause, JaxserveError):
            failure = cause
        elif is_out_of_memory(cause):
            failure = DeviceMemoryError(
                f"the device ran out of memory while serving ({cause}); give a smaller kv_memory, "
                "max_step_tokens or max_slots"
            )
        else:
            failure = EngineFailedError(
                f"the engine stopped: {type(cause).__name__}: {cause}; create a new runtime, and "
                "report this with the traceback of __cause__"
            )
        failure.__cause__ = None if failure is cause else cause
        with self._changed:
            self._failure = failure
            self._answers.update((answer.request.id, answer) for answer in self._arrived)
        self._end_all(failure)

    def _end_all(self, error: JaxserveError) -> None:
        self._engine.stats.end_busy_period()
        for answer in self._answers.values():
            answer.fail(error, self._clock.now())
        self._engine.abandon()
