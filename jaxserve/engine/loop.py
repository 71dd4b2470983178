"""The thread that drives an engine, and its thread-safe facade."""

from __future__ import annotations

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar, final, get_args

from jaxserve.core.clock import Clock
from jaxserve.core.errors import (
    DeviceMemoryError,
    EngineBusyError,
    EngineFailedError,
    InvalidConfigError,
    JaxserveError,
    RuntimeClosedError,
    is_out_of_memory,
)

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_Job = TypeVar("_Job")

# How a pause treats the running requests (`EngineLoop.paused`).
Running = Literal["finish", "restart", "abort", "keep"]


def check_running(running: Running) -> None:
    """Raise InvalidConfigError for an unknown treatment of running requests."""
    if running not in get_args(Running):
        raise InvalidConfigError(f"running={running!r} is unknown; pass one of {get_args(Running)}")


class EngineBase(ABC, Generic[_Job]):
    """An engine that an `EngineLoop` drives. Only the loop's thread calls it.

    By default there is nothing to do in idle time, and the engine cannot be paused.

    Attributes:
      changed: condition that another thread notifies when `step` has something to do.
      memory_remedy: what to do if the device has too little memory for it.
    """

    changed: threading.Condition
    memory_remedy: ClassVar[str]

    @property
    @abstractmethod
    def has_work(self) -> bool: ...

    @property
    def idle_until_s(self) -> float | None:
        """The time until which nothing has to be done although there is work; None for now."""
        return None

    @property
    def plans_late(self) -> bool:
        """Whether `step` should wait for `idle_until_s`, although jobs may have begun since."""
        return False

    @abstractmethod
    def begin(self, job: _Job) -> None:
        """Start a submitted job."""

    @abstractmethod
    def cancel(self, id: str) -> None:
        """End a job with its present output; do nothing if it has ended or is unknown."""

    @abstractmethod
    def step(self) -> object:
        """Advance the jobs by one step. It is called while there is work."""

    def use_idle_time(self) -> bool:
        """Do a part of the deferred work, such as measurements; return False if none is left.

        It is called while there is no work, after steps.
        """
        return False

    def rest(self) -> None:
        """Record that the loop waits, or stops."""

    def make_room(self, running: Running) -> None:
        """End, restart or halt the running jobs before a pause, as `EngineLoop.paused` says."""
        raise NotImplementedError(f"{type(self).__name__} cannot be paused")

    def settle(self) -> None:
        """Record that a pause is over, in which jobs may have ended."""

    @abstractmethod
    def cancel_all(self) -> None:
        """End every job that has begun with its present output."""

    @abstractmethod
    def fail_all(self, error: JaxserveError, not_begun: Sequence[_Job]) -> None:
        """End every job that has not ended with an error, including those that have not begun."""

    def failure_of(self, cause: Exception) -> JaxserveError:
        """Return the typed error for an exception that stopped the loop."""
        if isinstance(cause, JaxserveError):
            return cause
        if is_out_of_memory(cause):
            return DeviceMemoryError(
                f"the device ran out of memory while serving ({cause}); {self.memory_remedy}"
            )
        return EngineFailedError(
            f"the engine stopped: {type(cause).__name__}: {cause}; create a new runtime, and "
            "report this with the traceback of __cause__"
        )


@final
@dataclass(eq=False)
class _Pause:
    """A caller's request for a pause; `is_held` is true while the loop is paused for it."""

    running: Running
    is_held: bool = False


@final
class EngineLoop(Generic[_Job]):
    """A thread that drives an engine; any thread may call `submit`, `cancel` and `close`.

    Jobs join at the next iteration; there is no batch window. Every job is ended exactly once, also
    when the loop fails or is closed.
    """

    def __init__(self, engine: EngineBase[_Job], clock: Clock, *, name: str):
        self._engine = engine
        self._clock = clock
        self._changed = engine.changed
        self._arrived: list[_Job] = []
        self._beginning: list[_Job] = []
        self._held: list[_Job] = []  # arrived during a pause
        self._cancelled: list[str] = []
        self._questions: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._is_closing = False
        self._has_idle_work = False  # there may be some
        self.is_halted = False
        self._one_pause = threading.Lock()
        self._pause: _Pause | None = None
        self._failure: JaxserveError | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def check(self) -> None:
        with self._changed:
            self._raise_if_over()

    def submit(self, *jobs: _Job) -> None:
        """Submit jobs, which start in the same iteration. Ids of unfinished jobs must differ.

        Raises:
          RuntimeClosedError: the loop was closed.
          EngineFailedError: the loop failed before.
        """
        with self._changed:
            self._raise_if_over()
            (self._arrived if self._pause is None else self._held).extend(jobs)
            self._changed.notify_all()

    def cancel(self, id: str) -> None:
        """End a job with its present output; do nothing if it has ended or is unknown."""
        with self._changed:
            self._cancelled.append(id)
            self._changed.notify_all()

    def tell(self, news: Callable[[], None]) -> None:
        """Call `news` on the loop's thread between steps; never, if the loop ends before."""
        with self._changed:
            if self._failure is None and not self._is_closing:
                done: Future[None] = Future()
                done.add_done_callback(_log_error)
                self._questions.append((news, done))
                self._changed.notify_all()

    def ask(self, question: Callable[[], _T]) -> _T:
        """Return the result of `question`, run on the loop's thread between steps or after a pause.

        On the loop's thread (`is_here`) the call would wait for itself. Raises what `submit` does.
        """
        answer: Future[_T] = Future()
        with self._changed:
            self._raise_if_over()
            self._questions.append((question, answer))
            self._changed.notify_all()
        return answer.result()

    @contextmanager
    def paused(
        self, running: Running = "finish", *, until_s: float | None = None
    ) -> Iterator[None]:
        """Keep the loop's thread from its engine within the block.

        No step is in flight in the block. Jobs that are submitted or cancelled from now on are
        taken in after the block; `ask` and `close` wait for its end.

        Args:
          running: treatment of the jobs that were submitted before. "finish" waits for their end,
            "abort" cancels them, "keep" continues them after the block, and "restart" starts them
            again after the block. "restart" continues a job that has sent output to a stream or has
            ended one of its samples.
          until_s: the time on the clock until which the block must have begun; None for no limit.

        Raises:
          EngineBusyError: the submitted jobs, or another pause, had not ended by then. They
            continue. Or the loop is halted, so that no job can finish.
          RuntimeClosedError: the loop was closed.
          EngineFailedError: the loop failed before.
        """
        with self._alone(until_s):
            try:
                self._hold(running, until_s)
                yield
            finally:
                with self._changed:
                    self._pause = None
                    self._arrived += self._held
                    self._held = []
                    self._changed.notify_all()

    def _hold(self, running: Running, until_s: float | None) -> None:
        with self._changed:
            self._raise_if_over()
            if self.is_halted and running == "finish":
                raise EngineBusyError(
                    "this call waits for the end of running requests, and the runtime is paused; "
                    "call rt.resume() before it"
                )
            pause = self._pause = _Pause(running)
            self._changed.notify_all()
            while not pause.is_held:
                left_s = None if until_s is None else until_s - self._clock.now()
                if left_s is not None and left_s <= 0:
                    raise EngineBusyError(
                        "requests still run after the seconds that this call may wait for "
                        "their end; pass more seconds (max_wait_s), or call it when less runs"
                    )
                self._changed.wait(None if left_s is None else min(left_s, threading.TIMEOUT_MAX))
                self._raise_if_over()

    def halt(self, running: Running) -> None:
        """Advance no job from now on, until `go_on`. No step is in flight after the call.

        Jobs are still accepted, and wait. `cancel`, `ask` and `paused` work; `running` is as in
        `paused`. Raises what `submit` does.
        """
        with self.paused(running):
            self.is_halted = True

    def go_on(self) -> None:
        """Advance jobs again after `halt`; do nothing if the loop is not halted."""
        with self._changed:
            self._raise_if_over()
            self.is_halted = False
            self._changed.notify_all()

    @contextmanager
    def _alone(self, until_s: float | None) -> Iterator[None]:
        """Exclude other pauses from the block; EngineBusyError if one lasts beyond `until_s`."""
        left_s = math.inf if until_s is None else until_s - self._clock.now()
        if not self._one_pause.acquire(timeout=min(max(0.0, left_s), threading.TIMEOUT_MAX)):
            raise EngineBusyError(
                "another call has paused this runtime, for new weights or measurements, and had "
                "not ended after the seconds that this call may wait; pass more seconds "
                "(max_wait_s), or call it again later"
            )
        try:
            yield
        finally:
            self._one_pause.release()

    def fail(self, error: JaxserveError) -> None:
        """End the loop, after a pause if there is one; every job and later call gets this error."""
        with self._changed:
            if self._failure is None:
                self._failure = error
                self._changed.notify_all()

    @property
    def is_here(self) -> bool:
        """Whether this is the loop's thread, where sinks and callbacks of futures run."""
        return threading.current_thread() is self._thread

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def close(self) -> None:
        """Cancel the remaining jobs and stop the thread; return when it has ended."""
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
                if self.is_halted or self._engine.plans_late:
                    continue
                if self._engine.has_work:
                    self._engine.step()
                    self._has_idle_work = True
                elif self._has_idle_work:
                    self._has_idle_work = self._engine.use_idle_time()
        except Exception as cause:
            self._fail(cause)
        else:
            self._engine.cancel_all()
            self._end_all(RuntimeClosedError("the runtime was closed before this request began"))

    def _take_in(self) -> bool:
        """Wait for work or for the end of a pause, then accept it; return False when closing."""
        pause = self._pause
        if pause is not None:
            self._engine.make_room(pause.running)
            self._stand_still(pause)
        with self._changed:
            while not (self._arrived or self._cancelled or self._is_closing):
                left_s = self._idle_s()
                is_over = self._failure is not None or self._pause is not pause
                if left_s <= 0 or is_over or self._questions or self._may_use_idle_time():
                    break
                self._engine.rest()
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
            if self._failure is not None:
                raise self._failure
            cancelled, self._cancelled = self._cancelled, []
            if self._is_closing:
                return False
            self._beginning, self._arrived = self._arrived, []
        for job in self._beginning:
            self._engine.begin(job)
        self._beginning = []
        for id in cancelled:
            self._engine.cancel(id)
        while self._questions:
            question, asked = self._questions.pop(0)
            try:
                asked.set_result(question())
            except Exception as error:
                asked.set_exception(error)
        return True

    def _stand_still(self, pause: _Pause) -> None:
        """Wait until the pause is over; return at once if jobs must finish before it."""
        with self._changed:
            if pause.running in ("finish", "abort") and (self._engine.has_work or self._arrived):
                return
            self._engine.rest()
            pause.is_held = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._pause is not pause)
        self._engine.settle()

    def _idle_s(self) -> float:
        """Return the seconds until the next step is due; infinite without one."""
        if self.is_halted or not self._engine.has_work:
            return math.inf
        wake_s = self._engine.idle_until_s
        return 0.0 if wake_s is None else wake_s - self._clock.now()

    def _may_use_idle_time(self) -> bool:
        return self._has_idle_work and not (self._engine.has_work or self.is_halted)

    def _fail(self, cause: Exception) -> None:
        if self._failure is None:
            failure = self._engine.failure_of(cause)
            if failure is not cause:
                failure.__cause__ = cause
            self.fail(failure)
        assert self._failure is not None
        self._end_all(self._failure)

    def _end_all(self, error: JaxserveError) -> None:
        self._engine.rest()
        with self._changed:
            waiting = [*self._beginning, *self._arrived, *self._held]
            self._beginning, self._arrived, self._held = [], [], []
        self._engine.fail_all(error, waiting)
        for _, asked in self._questions:
            asked.set_exception(error)


def _log_error(done: Future[None]) -> None:
    """Log why news could not be taken in, since nothing waits for it."""
    if not done.cancelled() and (error := done.exception()) is not None:
        _log.error("news for the loop was lost: %s", error, exc_info=error)
