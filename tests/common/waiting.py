"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], object], limit_s: float = 30.0) -> None:
    """Wait until a condition holds; fail when it does not within `limit_s` seconds."""
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s, f"it does not hold after {limit_s} s"
        time.sleep(0.002)
