"""Processes in tests: children, and interrupts of this one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Python code to start one with, so that Ctrl-C works in it even where the tests run as a shell's
# background job, which ignores interrupts and so do its children.
HEED_INTERRUPTS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"


@contextmanager
def heeding_interrupts() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt in the block, however the tests were started."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    """Send SIGINT to the main thread, as Ctrl-C does, also where it waits for a lock."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def one_device_environment() -> dict[str, str]:
    """Of a process that has one device, and compiles as quickly as the tests do."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in flags if "host_platform_device_count" not in flag]
    return {**os.environ, "XLA_FLAGS": " ".join(kept)}
