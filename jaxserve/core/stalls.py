"""How long this process's computations have stood still for executables."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final


@final
class Stalls:
    """Counts the seconds in which a step waits for its executable; any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._since_s = 0.0
        self._ended_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block; blocks of several threads at once count once."""
        with self._lock:
            if not self._num_waiting:
                self._since_s = time.monotonic()
            self._num_waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_waiting -= 1
                if not self._num_waiting:
                    self._ended_s += time.monotonic() - self._since_s

    @property
    def is_waiting(self) -> bool:
        return self._num_waiting > 0

    def seconds(self) -> float:
        """Return the seconds so far, those of a present wait included."""
        with self._lock:
            present_s = time.monotonic() - self._since_s if self._num_waiting else 0.0
            return self._ended_s + present_s


STALLS = Stalls()
