"""Seconds of calls on a device, and of decode iterations in a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxserve.engine.recorder import StepRecord


def timings(
    call: Callable[..., Any], *arguments: Any, repeats: int = 9, calls: int = 1
) -> list[float]:
    """Return the seconds of `repeats` calls, each waited for, after one that compiles.

    `calls` calls are submitted before they are waited for, so that a GPU does not wait for the host
    between them; the seconds are those of one.
    """
    jax.block_until_ready(call(*arguments))
    times = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        for _ in range(calls - 1):
            call(*arguments)
        jax.block_until_ready(call(*arguments))
        times.append((time.perf_counter() - begin_s) / calls)
    return times


def seconds(call: Callable[..., Any], *arguments: Any, repeats: int = 9, calls: int = 1) -> float:
    """Return the median of `timings`."""
    return statistics.median(timings(call, *arguments, repeats=repeats, calls=calls))


def full_step_s(steps: Sequence[StepRecord], batch_size: int) -> float | None:
    """Return the median seconds of an iteration in which exactly `batch_size` sequences decode.

    None if the run has no such iteration.
    """
    times = []
    for before, step in zip(steps, steps[1:], strict=False):
        is_full = step.kind == "decode loop" and step.num_rows == batch_size
        if is_full and step.collected_s is not None and before.collected_s is not None:
            begin_s = max(step.submitted_s, before.collected_s)
            times.append((step.collected_s - begin_s) / step.num_iterations)
    return sorted(times)[len(times) // 2] if times else None
