"""Processes in which a grammar is compiled on trial, since only a process can be stopped."""

from __future__ import annotations

import json
import os
import queue
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from jaxserve.core.errors import GrammarTooComplexError, RuntimeClosedError

_PROGRAM = Path(__file__).with_name("grammar_trial.py")
# Bytes that a process may allocate.
_MAX_BYTES = 1 << 30
# Seconds without a grammar after which a process ends.
_IDLE_S = 60.0


@final
class GrammarTrials:
    """Processes that compile grammars on trial. They are made when they are needed, and reused.

    What a trial ends within its bounds, this process can compile with as much time and memory; and
    only there a compilation can be stopped, since llguidance cannot be interrupted.

    Args:
      outline: size of the vocabulary, name of each control token by number, and the end token.
      limits: those of llguidance.
      timeout_s: of a trial.
      idle_s: without a grammar, after which a process ends.
      max_bytes: that a process may allocate.
    """

    def __init__(
        self,
        outline: tuple[int, dict[int, str], int],
        limits: Mapping[str, Any],
        timeout_s: float,
        *,
        idle_s: float = _IDLE_S,
        max_bytes: int = _MAX_BYTES,
    ):
        self._start = _message([*outline, dict(limits), max_bytes, idle_s])
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._idle: queue.LifoQueue[_Trial] = queue.LifoQueue()
        self._lock = threading.Lock()
        self._all: set[_Trial] = set()
        self._is_closed = False

    def check(self, grammar: str) -> None:
        """Compile a grammar in another process; a grammar that is not valid passes, too.

        Any thread may call it.

        Raises:
          TimeoutError: it takes too long; the process was ended.
          GrammarTooComplexError: it takes too much memory, or llguidance ends the process.
          RuntimeClosedError: `close` was called.
        """
        until_s = time.monotonic() + self._timeout_s
        trial = self._take()
        try:
            while not trial.compiles(grammar, until_s - time.monotonic()):
                self._raise_if_closed()
                if not trial.has_rested:
                    raise _too_large(self._max_bytes)
                self._drop(trial)  # it ended just before the grammar came
                trial = self._new()
        except BaseException:
            self._drop(trial)
            raise
        self._idle.put(trial)

    def close(self) -> None:
        """End the processes; what is on trial ends with RuntimeClosedError."""
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
    """One process."""

    def __init__(self, start: bytes):
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # no signal of a terminal ends it
        )
        self._start = start

    def compiles(self, grammar: str, timeout_s: float) -> bool:
        """Return whether the process has compiled a grammar, rather than ended.

        Raises:
          TimeoutError: it has done neither.
        """
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        with suppress(BrokenPipeError):
            stdin.write(self._start + _message(grammar))
            stdin.flush()
            self._start = b""
        if not select.select([stdout], [], [], max(0.0, timeout_s))[0]:
            raise TimeoutError
        return os.read(stdout.fileno(), 1) == b"."

    @property
    def has_rested(self) -> bool:
        """Whether it has ended because no grammar came for a while."""
        return self.process.wait() == 0

    def end(self) -> None:
        """End the process, if it has not, and wait for its end."""
        self.process.kill()
        with suppress(BrokenPipeError):
            self.process.communicate()


def _message(content: Any) -> bytes:
    text = json.dumps(content).encode()
    return struct.pack("<q", len(text)) + text


def _too_large(max_bytes: int) -> GrammarTooComplexError:
    return GrammarTooComplexError(
        f"compiling the grammar takes more than {max_bytes >> 20} MiB of memory, or crashes "
        "llguidance; pass a smaller one, with fewer alternatives and smaller numbers of repetitions"
    )
