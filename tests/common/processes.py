"""Processes in tests: children, and interrupts of this one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Python code that makes Ctrl-C work in a child process. If the tests run as a shell's background
# job, they and their children ignore interrupts.
HEED_INTERRUPTS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"


@contextmanager
def heeding_interrupts() -> Iterator[None]:
    """Make SIGINT raise KeyboardInterrupt in the block, even if the tests ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    """Send SIGINT to the main thread, as Ctrl-C does, even if it waits for a lock."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def one_device_environment() -> dict[str, str]:
    """Return the environment of a process that has one device and compiles as fast as the tests."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in flags if "host_platform_device_count" not in flag]
    return {**os.environ, "XLA_FLAGS": " ".join(kept)}
