"""Threads that compile or load executables, in the order in which they are likely to be needed."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, final

_log = logging.getLogger(__name__)

# XLA and MLIR recurse deeply; the stacks of Python's threads are too small for large programs.
_STACK_BYTES = 64 << 20
_MAX_THREADS = 8
_stack_size = threading.Lock()

_T = TypeVar("_T")
Steps = Sequence[tuple[str, Callable[[], Any]]]


@final
class Preparation:
    """Threads that call functions, each once, in order.

    XLA compiles and loads without Python's global lock, so several threads shorten the total time.

    Args:
      on_end: called when each function has returned or failed; not if `close` was called.
    """

    def __init__(
        self,
        steps: Steps,  # (name, function)
        on_end: Callable[[], None] | None = None,
        *,
        num_first: int = 0,  # number of leading steps that `has_first` waits for
        delay_s: float = 0.0,  # seconds before the first call, unless `has_first` is called earlier
    ):
        self._steps = iter(list(enumerate(steps)))
        self._num_steps = self._num_left = len(steps)
        self._num_first = self._num_first_left = num_first
        self._on_end = on_end
        self._lock = threading.Lock()
        self._delay_s = delay_s
        self._begun = threading.Event()
        self._is_closed = False
        self._made: set[str] = set()
        # Names of functions that have returned, and errors of those that failed.
        self._news: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()
        num = min(len(steps), os.cpu_count() or 1, _MAX_THREADS)
        self._threads = [
            threading.Thread(target=self._run, name=f"jaxserve-compile-{i}", daemon=True)
            for i in range(num)
        ]
        with _large_stacks():
            for thread in self._threads:
                thread.start()

    def finished(self) -> Iterator[str]:
        """Yield the name of each function when it has returned; end after the last one.

        Raises the error of one that failed; functions that have not begun are then dropped.
        """
        for _ in range(self._num_steps):
            try:
                news = self._news.get()
            except KeyboardInterrupt:  # a process that ends while XLA compiles would crash
                self.close()
                raise
            if isinstance(news, Exception):
                self.close()
                raise news
            yield news

    def has_first(self) -> bool:
        """Return whether each of the first `num_first` functions has returned or failed.

        It ends the delay before the first call.
        """
        self._begun.set()
        return self._num_first_left == 0

    def is_made(self, name: str) -> bool:
        return name in self._made

    def close(self) -> None:
        """Drop the functions that have not begun, and wait for the running ones."""
        with self._lock:
            self._is_closed = True
        self._begun.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        self._begun.wait(self._delay_s)
        while True:
            with self._lock:
                step = None if self._is_closed else next(self._steps, None)
            if step is None:
                return
            index, (name, function) = step
            try:
                function()
            except Exception as error:
                _log.warning("%s was not prepared: %s: %s", name, type(error).__name__, error)
                self._news.put(error)
            else:
                self._made.add(name)
                self._news.put(name)
            with self._lock:
                self._num_left -= 1
                self._num_first_left -= index < self._num_first
                is_last = self._num_left == 0 and not self._is_closed
            if is_last and self._on_end is not None:
                self._on_end()


def prepared_together(*functions: Callable[[], _T]) -> list[_T]:
    """Call functions on other threads; return their results, or raise the first error."""
    results: dict[int, _T] = {}

    def kept(index: int, function: Callable[[], _T]) -> None:
        results[index] = function()

    steps = [("", partial(kept, i, function)) for i, function in enumerate(functions)]
    for _ in Preparation(steps).finished():
        pass
    return [results[i] for i in range(len(functions))]


def start_thread(name: str, function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function, name=name, daemon=True)
    with _large_stacks():
        thread.start()
    return thread


@contextmanager
def _large_stacks() -> Iterator[None]:
    """Give threads that start within the block large stacks."""
    with _stack_size:
        before = threading.stack_size(_STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)
