"""Arrival times: all at once, at a constant interval, or a Poisson process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload.item import WorkloadItem


def with_arrivals(items: Sequence[WorkloadItem], pattern: str, seed: int) -> list[WorkloadItem]:
    """Return the items with arrival times, the first at 0.

    Args:
      pattern: "all" for all at once, "constant:S" for one every S seconds, or "poisson:R" for R
        per second on average.
      seed: seed of the Poisson draw.

    Raises:
      InvalidConfigError: the pattern is unknown, or its number is not above 0.
    """
    times = arrival_times(len(items), pattern, seed)
    return [replace(item, arrival_s=time) for item, time in zip(items, times, strict=True)]


def arrival_times(num: int, pattern: str, seed: int) -> list[float]:
    """Return the arrival times of `num` requests; see `with_arrivals`."""
    kind, _, number = pattern.partition(":")
    gaps = np.zeros(max(0, num - 1))
    if kind == "constant":
        gaps += _positive(number, pattern)
    elif kind == "poisson":
        gaps = np.random.default_rng(seed).exponential(1 / _positive(number, pattern), len(gaps))
    elif pattern != "all":
        raise _unknown(pattern)
    return [0.0, *np.cumsum(gaps).tolist()][:num]


def _positive(number: str, pattern: str) -> float:
    try:
        value = float(number)
    except ValueError:
        raise _unknown(pattern) from None
    if not 0 < value < float("inf"):
        raise _unknown(pattern)
    return value


def _unknown(pattern: str) -> InvalidConfigError:
    return InvalidConfigError(
        f"arrivals {pattern!r} are unknown; pass all, constant:SECONDS or poisson:RATE, with a "
        "number above 0"
    )
