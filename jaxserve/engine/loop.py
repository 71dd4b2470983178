"""The thread that runs an engine, and its thread-safe facade."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, final

from jaxserve.core.clock import Clock
from jaxserve.core.errors import (
    DeviceMemoryError,
    EngineBusyError,
    EngineFailedError,
    JaxserveError,
    RuntimeClosedError,
)
from jaxserve.core.request import Completion, Request
from jaxserve.engine.answers import Answer
from jaxserve.engine.engine import Engine
from jaxserve.engine.request_log import RequestLog
from jaxserve.execution.device_errors import is_out_of_memory
from jaxserve.scheduling.collect import Progress
from jaxserve.scheduling.sequence import Phase

_T = TypeVar("_T")

# How a pause for new weights treats the running requests.
Running = Literal["finish", "restart", "abort"]


@final
@dataclass(eq=False)
class _Pause:
    """A caller's request for a pause; `is_held` is true while the loop is paused for it."""

    running: Running | Literal["keep"]
    is_held: bool = False


@final
class EngineLoop:
    """A thread that runs an engine; any thread may call `submit`, `cancel` and `close`.

    Requests join at the next iteration; there is no batch window. Every answer's future is
    resolved exactly once, also when the loop fails or is closed.

    Args:
      logs: logs that get every request that began and ended, unless the loop itself failed.
    """

    def __init__(self, engine: Engine, clock: Clock, logs: Sequence[RequestLog] = ()):
        self._engine = engine
        self._clock = clock
        self._logs = logs
        self._changed = engine.changed
        self._arrived: list[Answer] = []
        self._held: list[Answer] = []  # arrived during a pause
        self._cancelled: list[str] = []
        self._questions: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._is_closing = False
        self._one_pause = threading.Lock()
        self._pause: _Pause | None = None
        self._failure: JaxserveError | None = None
        # Whether something may be left to do while nothing else is.
        self._may_use_idle_time = False
        self._answers: dict[str, Answer] = {}
        self._by_sequence: dict[int, Answer] = {}
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error that `submit` would raise, if any."""
        with self._changed:
            self._raise_if_over()

    def submit(self, *answers: Answer) -> None:
        """Submit answers that have no sequences yet; their requests start in the same iteration.

        The caller ensures that no request that has not ended has the same id.

        Raises:
          RuntimeClosedError: the loop was closed.
          EngineFailedError: the loop failed before.
        """
        with self._changed:
            self._raise_if_over()
            (self._arrived if self._pause is None else self._held).extend(answers)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """End a request with the tokens it has; do nothing if it has ended or is unknown."""
        with self._changed:
            self._cancelled.append(request_id)
            self._changed.notify_all()

    def ask(self, question: Callable[[], _T]) -> _T:
        """Return the result of `question`, run on the loop's thread between steps or after a pause.

        Do not call it on the loop's thread (`is_here`), which would wait for itself.

        Raises:
          RuntimeClosedError: the loop was closed.
          EngineFailedError: the loop failed before.
        """
        answer: Future[_T] = Future()
        with self._changed:
            self._raise_if_over()
            self._questions.append((question, answer))
            self._changed.notify_all()
        return answer.result()

    @contextmanager
    def paused(
        self, running: Running | Literal["keep"] = "finish", *, until_s: float | None = None
    ) -> Iterator[None]:
        """Keep the loop's thread from using the engine within the block.

        No step is in flight in the block. Requests that are submitted from now on start after the
        block; calls of `submit`, `cancel` and `close` wait in the block.

        Args:
          running: treatment of the requests that were submitted before. "finish" waits for their
            end, "abort" cancels them, "keep" continues them after the block, and "restart" starts
            them again after the block. "restart" continues a request that has sent tokens to a
            stream or has ended one of its samples.
          until_s: the time on the clock until which the block must have begun; None for no limit.

        Raises:
          EngineBusyError: the submitted requests had not ended by then. They continue.
          RuntimeClosedError: the loop was closed.
          EngineFailedError: the loop failed before.
        """
        with self._one_pause, self._changed:
            self._raise_if_over()
            pause = self._pause = _Pause(running)
            self._changed.notify_all()
            try:
                while not pause.is_held:
                    left_s = None if until_s is None else until_s - self._clock.now()
                    if left_s is not None and left_s <= 0:
                        raise EngineBusyError(
                            "requests still run after the seconds that this call may wait for "
                            "their end; pass more seconds (max_wait_s), or call it when less runs"
                        )
                    self._changed.wait(left_s)
                    self._raise_if_over()
                yield
            finally:
                self._pause = None
                self._arrived += self._held
                self._held = []
                self._changed.notify_all()

    @property
    def is_here(self) -> bool:
        """Whether this is the loop's thread, where sinks and callbacks of futures run."""
        return threading.current_thread() is self._thread

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def close(self) -> None:
        """Cancel the remaining requests and stop the thread; return when it has ended."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if not self.is_here:
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
        """Wait for work or for the end of a pause, then accept it; return False when closing."""
        pause = self._pause
        if pause is not None:
            self._make_room(pause.running)
            self._stand_still(pause)
        with self._changed:
            while not (self._arrived or self._cancelled or self._is_closing or self._is_due()):
                if self._pause is not pause or self._questions or self._has_idle_work():
                    break
                self._engine.stats.end_busy_period()
                wake_s = self._engine.idle_until_s if self._engine.has_work else None
                self._changed.wait(None if wake_s is None else wake_s - self._clock.now())
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
            self._answers.update((answer.request.id, answer) for answer in arrived)
            if self._is_closing:
                self._answers.update((answer.request.id, answer) for answer in self._held)
                return False
        for answer in arrived:
            answer.begin(self._engine.add(answer.request))
            self._by_sequence.update((s.key, answer) for s in answer.sequences)
            for sequence in answer.sequences:
                if sequence.output:  # what a grammar forces before any step
                    answer.deliver(sequence, self._engine.scheduler)
            self._settle(answer)
        for request_id in cancelled:
            self._cancel(request_id)
        while self._questions:
            question, asked = self._questions.pop(0)
            try:
                asked.set_result(question())
            except Exception as error:
                asked.set_exception(error)
        return True

    def _make_room(self, running: Running | Literal["keep"]) -> None:
        """End, restart or halt the running requests, as `running` says; "finish" does nothing."""
        if running == "finish":
            return
        self._deliver(self._engine.drain())
        if running == "restart":
            for answer in self._answers.values():
                self._restart(answer)
        elif running == "abort":
            for request_id in list(self._answers):
                self._cancel(request_id)

    def _stand_still(self, pause: _Pause) -> None:
        """Wait until the pause is over; return at once if requests must finish before it."""
        with self._changed:
            if pause.running in ("finish", "abort") and (self._engine.has_work or self._arrived):
                return
            self._engine.stats.end_busy_period()
            pause.is_held = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._pause is not pause or self._is_closing)
        for answer in list(self._answers.values()):
            self._settle(answer)  # a request may have ended in the pause

    def _is_due(self) -> bool:
        wake_s = self._engine.idle_until_s
        return self._engine.has_work and (wake_s is None or wake_s <= self._clock.now())

    def _has_idle_work(self) -> bool:
        return self._may_use_idle_time and not self._engine.has_work

    def _iterate(self) -> None:
        if self._engine.has_work:
            self._deliver(self._engine.step())
            self._may_use_idle_time = True
        elif self._may_use_idle_time:
            self._engine.stats.end_busy_period()
            self._may_use_idle_time = self._engine.use_idle_time()

    def _deliver(self, all_news: Iterable[Progress]) -> None:
        scheduler = self._engine.scheduler
        touched: dict[str, Answer] = {}
        for news in all_news:
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

    def _restart(self, answer: Answer) -> None:
        keeps_output = answer.has_shown or any(
            sequence.phase is Phase.FINISHED for sequence in answer.sequences
        )
        for sequence in answer.sequences:
            self._engine.scheduler.restart(sequence, keeps_output=keeps_output)
        if not keeps_output:
            answer.restart()

    def _settle(self, answer: Answer) -> None:
        if answer.settle(partial(self._keep, answer.request)):
            for sequence in answer.sequences:
                del self._by_sequence[sequence.key]
            del self._answers[answer.request.id]

    def _keep(self, request: Request, completion: Completion) -> None:
        self._engine.recorder.request_ended(completion)
        for log in self._logs:
            log.append(request, completion)

    def _cancel_all(self) -> None:
        """End all requests: with their tokens if they have sequences, and else with an error."""
        for request_id, answer in list(self._answers.items()):
            if answer.sequences:
                self._cancel(request_id)
        self._end_all(RuntimeClosedError("the runtime was closed before this request began"))

    def _fail(self, cause: Exception) -> None:
        if isinstance(cause, JaxserveError):
            failure = cause
        elif is_out_of_memory(cause):
            failure = DeviceMemoryError(
                f"the device ran out of memory while serving ({cause}); pass a smaller kv_memory, "
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
            self._changed.notify_all()
            self._answers.update((a.request.id, a) for a in (*self._arrived, *self._held))
        self._end_all(failure)

    def _end_all(self, error: JaxserveError) -> None:
        self._engine.stats.end_busy_period()
        for answer in self._answers.values():
            answer.fail(error, self._clock.now())
        for _, asked in self._questions:
            asked.set_exception(error)
        self._engine.abandon()
