"""Page files whose calls a test can block, like those of a slow disk."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

from jaxserve.memory.disk_tier import PageFiles


class Gate:
    """A gate that records calls, and blocks them while it is shut."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []
        self._is_open = threading.Event()
        self._is_open.set()

    def shut(self) -> None:
        """Block later calls, and count from 0."""
        self.calls.clear()
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()

    def pass_through(self, key: bytes) -> None:
        self.calls.append(key)
        assert self._is_open.wait(10)

    def wait_for_calls(self, count: int) -> None:
        """Wait until this number of calls has come."""
        end_s = time.monotonic() + 10
        while len(self.calls) < count:
            assert time.monotonic() < end_s
            time.sleep(0.001)


class GatedFiles:
    """Page files whose reads and writes pass through gates."""

    def __init__(self, folder: Path, max_bytes: int = 1_000_000):
        self.reading, self.writing = Gate(), Gate()
        # Keys of reads and writes in the order of the calls.
        self.keys: list[bytes] = []
        # Keys of files that are evicted right after they are looked for the next time.
        self.vanishing: set[bytes] = set()
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
        is_found = key in self._files
        if key in self.vanishing:
            (self._files.folder / f"{key.hex()}.page").unlink()
            assert self._files.read(key) is None  # so that it is not looked for again
            self.vanishing.remove(key)
        return is_found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


class PoorFiles:
    """Page files that are slow to read, and sometimes do not find or do not keep a file."""

    def __init__(self, files: PageFiles, rng: random.Random):
        self._files = files
        self._rng = rng

    def read(self, key: bytes) -> bytes | None:
        time.sleep(self._rng.choice([0.0, 0.0, 0.0005, 0.002]))
        return self._files.read(key) if self._rng.random() < 0.9 else None

    def write(self, key: bytes, contents: bytes) -> None:
        if self._rng.random() < 0.9:
            self._files.write(key, contents)

    def __contains__(self, key: bytes) -> bool:
        return key in self._files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


def spoil(folder: Path, rng: random.Random, share: float = 0.2) -> None:
    """Truncate a share of the files, and change a byte of as many others."""
    for path in sorted(folder.iterdir()):
        contents = path.read_bytes()
        if rng.random() < share:
            path.write_bytes(contents[: len(contents) // 2])
        elif contents and rng.random() < share:
            at = rng.randrange(len(contents))
            path.write_bytes(contents[:at] + bytes([contents[at] ^ 1]) + contents[at + 1 :])
