"""A disk that stands still."""

from __future__ import annotations

import threading
import time

from jaxserve.memory.disk_tier import DiskTier


class Gate:
    """A function of `PageFiles` that stands still until it is opened."""

    def __init__(self, disk: DiskTier, name: str):
        self.calls: list[bytes] = []
        self.is_open = threading.Event()
        self._function = getattr(disk.files, name)
        setattr(disk.files, name, self)

    def __call__(self, key: bytes, *contents: bytes) -> bytes | None:
        self.calls.append(key)
        assert self.is_open.wait(10)
        return self._function(key, *contents)

    def wait_for_calls(self, count: int) -> None:
        """Until it was called so often."""
        end_s = time.monotonic() + 10
        while len(self.calls) < count:
            assert time.monotonic() < end_s
            time.sleep(0.001)
