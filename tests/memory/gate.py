"""Files that stand still, as a slow disk does."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

from jaxserve.memory.page_files import PageFiles


class Gate:
    """What calls pass through: they are noted, and wait while it is shut."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []
        self._is_open = threading.Event()
        self._is_open.set()

    def shut(self) -> None:
        """Let later calls wait, and count from here."""
        self.calls.clear()
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()

    def pass_through(self, key: bytes) -> None:
        self.calls.append(key)
        assert self._is_open.wait(10)

    def wait_for_calls(self, count: int) -> None:
        """Until it was called so often."""
        end_s = time.monotonic() + 10
        while len(self.calls) < count:
            assert time.monotonic() < end_s
            time.sleep(0.001)


class GatedFiles:
    """Page files whose reads and writes pass gates."""

    def __init__(self, folder: Path, max_bytes: int = 1_000_000):
        self.reading, self.writing = Gate(), Gate()
        # Reads and writes in their order.
        self.keys: list[bytes] = []
        self._files = PageFiles(folder, max_bytes)

    def read(self, key: bytes) -> bytes | None:
        self.keys.append(key)
        self.reading.pass_through(key)
        return self._files.read(key)

    def write(self, key: bytes, contents: bytes) -> None:
        self.keys.append(key)
        self.writing.pass_through(key)
        self._files.write(key, contents)

    def __contains__(self, key: bytes) -> bool:
        return key in self._files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


class PoorFiles:
    """Page files that take their time to be read, and now and then are not found."""

    def __init__(self, files: PageFiles, rng: random.Random):
        self._files = files
        self._rng = rng

    def read(self, key: bytes) -> bytes | None:
        time.sleep(self._rng.choice([0.0, 0.0, 0.0005, 0.002]))
        return self._files.read(key) if self._rng.random() < 0.9 else None

    def __contains__(self, key: bytes) -> bool:
        return key in self._files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)
