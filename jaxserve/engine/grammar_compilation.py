"""Compiles grammars within bounds: on trial in other processes, then on threads."""

from __future__ import annotations

import atexit
import json
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from jaxserve.core.errors import GrammarsBusyError, GrammarTooComplexError, RuntimeClosedError
from jaxserve.steps.preparation import start_thread

# Maximum number of grammars compiled at once.
NUM_THREADS = 4
# Maximum number of jobs that wait for a thread.
MAX_WAITING = 32
# Seconds for which the end of the process waits for a job.
_EXIT_S = 60.0
# The jobs of all runtimes that run now, and whether the process ends.
_running: set[CompileJob] = set()
_is_exiting = threading.Event()
_PROGRAM = Path(__file__).with_name("grammar_trial.py")
# Bytes that a process may allocate.
_MAX_BYTES = 1 << 30
# Seconds without a grammar after which a process ends.
_IDLE_S = 60.0


@final
class CompileJob:
    """A function that runs once on one of the threads. Any number of threads may wait for it."""

    def __init__(self, function: Callable[[], Any]):
        self._function = function
        self._future: Future[Any] = Future()
        self._has_begun = threading.Event()  # or will never begin
        self._is_closed = False

    @property
    def is_dropped(self) -> bool:
        return self._future.cancelled()

    def run(self) -> None:
        if not self._future.set_running_or_notify_cancel():
            return
        self._has_begun.set()
        try:
            self._future.set_result(self._function())
        except BaseException as error:  # a panic of llguidance is not an Exception
            self._future.set_exception(error)

    def close(self) -> None:
        """Drop it if it has not begun, because its threads end."""
        self._is_closed = True
        if self._future.cancel():
            self._has_begun.set()

    def wait(self, timeout_s: float) -> None:
        wait_for([self._future], timeout_s)

    def result(self, timeout_s: float) -> Any:
        """Return what the function returned. It is dropped if no thread begins with it in time.

        Raises:
          TimeoutError: it runs; its thread continues with it.
          GrammarsBusyError: it was dropped.
          RuntimeClosedError: the threads were closed before it began.
        """
        until_s = time.monotonic() + timeout_s
        if not self._has_begun.wait(timeout_s) and not self._future.cancel():
            self._has_begun.wait()  # it is just beginning
        if self._future.cancelled():
            raise closed() if self._is_closed else _busy()
        return self._future.result(max(0.0, until_s - time.monotonic()))


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
        """Return a job; GrammarsBusyError if too many wait, RuntimeClosedError after `close`."""
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
    return RuntimeClosedError("this runtime was closed; create a new one")


def _busy() -> GrammarsBusyError:
    return GrammarsBusyError(
        f"other grammars are being compiled, and at most {MAX_WAITING} may wait, none for longer "
        "than a minute; submit the request again later"
    )


def _worker(jobs: queue.Queue[CompileJob | None]) -> Callable[[], None]:
    """Return the function of a thread; it holds no reference to the threads' owner."""

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
    """Wait for llguidance, which crashes the process if Python exits before it."""
    _is_exiting.set()
    for job in tuple(_running):
        job.wait(_EXIT_S)


@final
class GrammarTrials:
    """Processes that compile grammars on trial. They are started when needed, and reused.

    A grammar whose trial ends within its limits can be compiled in this process with as much time
    and memory. Only another process can be stopped, since llguidance cannot be interrupted.
    `outline` has the size of the vocabulary, the name of each control token by number, and the end
    token; `limits` are llguidance's; a process ends after `idle_s` without a grammar.
    """

    def __init__(
        self,
        outline: tuple[int, dict[int, str], int],
        limits: Mapping[str, Any],
        max_cpu_s: float,
        *,
        idle_s: float = _IDLE_S,
        max_bytes: int = _MAX_BYTES,
    ):
        self._start = _message([*outline, dict(limits), max_bytes, max_cpu_s, idle_s])
        self._max_bytes = max_bytes
        self._max_cpu_s = max_cpu_s
        self._idle: queue.LifoQueue[_Trial] = queue.LifoQueue()
        self._lock = threading.Lock()
        self._all: set[_Trial] = set()
        self._is_closed = False

    def check(self, grammar: str) -> None:
        """Compile a grammar in another process; an invalid grammar passes, too. Thread-safe.

        Raises:
          GrammarTooComplexError: it takes too much time or memory, or llguidance ends the process.
          RuntimeClosedError: `close` was called.
        """
        trial = self._take()
        try:
            while not trial.compiles(grammar):
                self._raise_if_closed()
                if trial.process.wait() == -signal.SIGPROF:
                    raise _too_slow(self._max_cpu_s)
                if not trial.has_rested:
                    raise _too_large(self._max_bytes)
                self._drop(trial)  # it ended just before the grammar came
                trial = self._new()
        except BaseException:
            self._drop(trial)
            raise
        self._idle.put(trial)

    def close(self) -> None:
        """End the processes; running trials end with RuntimeClosedError."""
        with self._lock:
            self._is_closed = True
            trials = tuple(self._all)
        for trial in trials:
            trial.process.kill()
        while not self._idle.empty():
            self._drop(self._idle.get())

    def _take(self) -> _Trial:
        with suppress(queue.Empty):
            return self._idle.get_nowait()
        return self._new()

    def _new(self) -> _Trial:
        with self._lock:
            self._raise_if_closed()
            trial = _Trial(self._start)
            self._all.add(trial)
        return trial

    def _drop(self, trial: _Trial) -> None:
        trial.end()
        with self._lock:
            self._all.discard(trial)

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise RuntimeClosedError("this runtime was closed; create a new one")


@final
class _Trial:
    def __init__(self, start: bytes):
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # no signal of a terminal ends it
        )
        self._start = start

    def compiles(self, grammar: str) -> bool:
        """Return whether the process compiled a grammar, or ended."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        with suppress(BrokenPipeError):
            stdin.write(self._start + _message(grammar))
            stdin.flush()
            self._start = b""
        return os.read(stdout.fileno(), 1) == b"."

    @property
    def has_rested(self) -> bool:
        """Whether it has ended because it was idle."""
        return self.process.wait() == 0

    def end(self) -> None:
        self.process.kill()
        with suppress(BrokenPipeError):
            self.process.communicate()


def _message(content: Any) -> bytes:
    text = json.dumps(content).encode()
    return struct.pack("<q", len(text)) + text


def _too_slow(max_cpu_s: float) -> GrammarTooComplexError:
    return GrammarTooComplexError(
        f"compiling the grammar takes more than {max_cpu_s:g} s of processor time; pass a smaller "
        "one, with fewer alternatives and smaller numbers of repetitions"
    )


def _too_large(max_bytes: int) -> GrammarTooComplexError:
    return GrammarTooComplexError(
        f"compiling the grammar takes more than {max_bytes >> 20} MiB of memory, or crashes "
        "llguidance; pass a smaller one, with fewer alternatives and smaller numbers of repetitions"
    )
