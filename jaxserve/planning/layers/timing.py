"""Seconds of calls on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

# A call is repeated in blocks of at least this long; the median of the blocks counts.
_BLOCK_S = 0.02
_NUM_BLOCKS = 3
_MAX_CALLS = 64
# A call that takes at least this long is not repeated.
_LONG_S = 0.25


def seconds_of(call: Callable[[Any], Any], start: Any) -> tuple[float, Any]:
    """Return the seconds of a call, and its last result.

    Each call takes the result of the one before, so that calls follow each other on the device as
    layers do. The first call, which compiles, does not count. A long call is timed once.

    Args:
      start: the argument of the first call; the call may donate it.
    """
    value = jax.block_until_ready(call(start))
    began_s = time.perf_counter()
    value = jax.block_until_ready(call(value))
    once_s = max(time.perf_counter() - began_s, 1e-6)
    if once_s >= _LONG_S:
        return once_s, value
    num_calls = min(_MAX_CALLS, max(1, round(_BLOCK_S / once_s)))
    blocks = []
    for _ in range(_NUM_BLOCKS):
        began_s = time.perf_counter()
        for _ in range(num_calls):
            value = call(value)
        value = jax.block_until_ready(value)
        blocks.append((time.perf_counter() - began_s) / num_calls)
    return statistics.median(blocks), value
