"""Threads that compile grammars, with a bound on what waits for them."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from typing import Any, final

from jaxserve.core.errors import GrammarsBusyError, RuntimeClosedError
from jaxserve.steps.preparation import start_thread

# Grammars that are compiled at once.
NUM_THREADS = 4
# Jobs that may wait for a thread.
MAX_WAITING = 32
# Seconds for which the end of the process waits for a job.
_EXIT_S = 60.0
# The jobs of all runtimes that run now, and whether the process ends.
_running: set[CompileJob] = set()
_is_exiting = threading.Event()


@final
class CompileJob:
    """A function that runs once on one of the threads. Any number of threads may wait for it."""

    def __init__(self, function: Callable[[], Any]):
        self._function = function
        self._future: Future[Any] = Future()
        self._has_begun = threading.Event()  # or will never begin
        self._begin_s = 0.0
        self._is_closed = False

    @property
    def is_dropped(self) -> bool:
        """Whether it will never begin."""
        return self._future.cancelled()

    @property
    def has_ended(self) -> bool:
        return self._future.done()

    def run(self) -> None:
        """Call the function, unless it was dropped before."""
        if not self._future.set_running_or_notify_cancel():
            return
        self._begin_s = time.monotonic()
        self._has_begun.set()
        try:
            self._future.set_result(self._function())
        except BaseException as error:  # a panic of llguidance is no Exception
            self._future.set_exception(error)

    def close(self) -> None:
        """Drop it if it has not begun, since its threads end."""
        self._is_closed = True
        if self._future.cancel():
            self._has_begun.set()

    def wait(self, timeout_s: float) -> None:
        """Wait until it has ended, or for some seconds."""
        wait_for([self._future], timeout_s)

    def result(self, timeout_s: float) -> Any:
        """Return what the function returned.

        Args:
          timeout_s: seconds that it may wait for a thread, and then as many that it may take. It
            is dropped if it waits for longer.

        Raises:
          TimeoutError: it takes longer; its thread goes on with it.
          GrammarsBusyError: it was dropped.
          RuntimeClosedError: the threads were closed before it began.
        """
        if not self._has_begun.wait(timeout_s) and not self._future.cancel():
            self._has_begun.wait()  # it begins just now
        if self._future.cancelled():
            raise closed() if self._is_closed else _busy()
        left_s = self._begin_s + timeout_s - time.monotonic()
        return self._future.result(max(0.0, left_s))


@final
class CompileThreads:
    """Daemon threads with stacks of 64 MB, since llguidance recurses without a limit."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[CompileJob | None] = queue.Queue()
        self._lock = threading.Lock()
        self._is_closed = False
        for i in range(NUM_THREADS):
            start_thread(f"jaxserve-grammar-{i}", _worker(self._jobs))

    def submit(self, function: Callable[[], Any]) -> CompileJob:
        """Return a job that calls a function.

        Raises:
          GrammarsBusyError: too many jobs wait.
          RuntimeClosedError: the threads were closed.
        """
        job = CompileJob(function)
        with self._lock:
            if self._is_closed:
                raise closed()
            if self._jobs.qsize() >= MAX_WAITING:
                raise _busy()
            self._jobs.put(job)
        return job

    def close(self) -> None:
        """Drop the jobs that wait, and end each thread when its job has ended."""
        with self._lock:
            self._is_closed = True
            with suppress(queue.Empty):
                while (job := self._jobs.get_nowait()) is not None:
                    job.close()
            for _ in range(NUM_THREADS):
                self._jobs.put(None)


def closed() -> RuntimeClosedError:
    """Return the error of a grammar that comes after `close`."""
    return RuntimeClosedError("this runtime was closed; create a new one")


def _busy() -> GrammarsBusyError:
    return GrammarsBusyError(
        f"other grammars are being compiled, and at most {MAX_WAITING} may wait, none for longer "
        "than a compilation may take; submit the request again later"
    )


def _worker(jobs: queue.Queue[CompileJob | None]) -> Callable[[], None]:
    """Return what a thread does; it holds no reference to the threads' owner."""

    def work() -> None:
        while (job := jobs.get()) is not None:
            _running.add(job)
            try:
                if not _is_exiting.is_set():
                    job.run()
            finally:
                _running.discard(job)

    return work


@atexit.register
def _wait_for_running() -> None:
    """Wait for llguidance, which ends the process with a crash if Python ends before it."""
    _is_exiting.set()
    for job in tuple(_running):
        job.wait(_EXIT_S)
