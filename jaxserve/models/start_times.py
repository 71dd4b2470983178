"""Seconds of the parts of a start, for `benchmarks.startup`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def timed(part: str) -> Iterator[None]:
    """Record the seconds of the block with `jax.monitoring`, as "/jaxserve/start/PART"."""
    begin_s = time.perf_counter()
    try:
        yield
    finally:
        passed_s = time.perf_counter() - begin_s
        jax.monitoring.record_event_duration_secs(f"/jaxserve/start/{part}", passed_s)
