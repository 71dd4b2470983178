"""Child processes of tests."""

from __future__ import annotations

import os

# Python code to start one with, so that Ctrl-C works in it even where the tests run as a shell's
# background job, which ignores interrupts and so do its children.
HEED_INTERRUPTS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"


def one_device_environment() -> dict[str, str]:
    """Of a process that has one device, and compiles as quickly as the tests do."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in flags if "host_platform_device_count" not in flag]
    return {**os.environ, "XLA_FLAGS": " ".join(kept)}
