"""Figures of one run, and comparisons of policies: the arithmetic of the benchmark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from jaxserve.core.metrics import spread

# Share of the requests at the beginning that are served and not counted, while queues fill.
WARM_SHARE = 0.2
# The largest latency that figures 2.7 to 2.11 show: beyond it a rate counts as too high.
BOUND_S = 0.5
# Quantiles of queueing and computing, for figure 2.9.
_QUANTILES = np.linspace(0.0, 1.0, 21)
# A policy is saturated if it serves less than this share of what arrives.
SATURATED = 0.9


@final
@dataclass(frozen=True)
class Served:
    """The times of one request, in seconds of one clock."""

    arrival_s: float
    begin_s: float
    end_s: float


def figures_of(served: Sequence[Served], *, warm_share: float = WARM_SHARE) -> dict[str, Any]:
    """Return throughput and latencies of a run.

    Requests that arrive in the first `warm_share` are left out of all figures. `requests_per_s`
    counts those of any arrival that ended between the first counted arrival and the last arrival,
    over that time; if there are none, as when all arrive at once, it is the number of requests over
    the time that all took. Latency is queueing (arrival to first task, as in 2.7.3) and computing
    (first task to end).

    Args:
      served: in the order of their arrivals, at least one.

    Returns:
      `quantiles` are those of queueing and computing at 0, 5, ..., 100 %.
    """
    counted = served[int(len(served) * warm_share) :]
    begin_s, end_s = counted[0].arrival_s, served[-1].arrival_s
    num_ended = sum(begin_s < one.end_s <= end_s for one in served)
    if num_ended:
        rate = num_ended / (end_s - begin_s)
    else:
        rate = len(served) / (max(one.end_s for one in served) - served[0].arrival_s)
    parts = {
        "queueing_s": [one.begin_s - one.arrival_s for one in counted],
        "computing_s": [one.end_s - one.begin_s for one in counted],
    }
    return {
        "requests_per_s": rate,
        "latency_s": spread([one.end_s - one.arrival_s for one in counted]),
        **{name: spread(seconds) for name, seconds in parts.items()},
        "quantiles": {
            name: [float(f"{found:.4g}") for found in np.quantile(seconds, _QUANTILES)]
            for name, seconds in parts.items()
        },
    }


def is_saturated(point: Mapping[str, Any]) -> bool:
    """Return whether a policy serves less than arrives, so that a higher rate tells no more."""
    return point["rate"] is not None and point["requests_per_s"] < SATURATED * point["rate"]


def peaks_of(points: Sequence[Mapping[str, Any]], within_s: float = math.inf) -> dict[str, float]:
    """Return the most requests a second that each policy served with a p90 latency within a bound.

    It is 0 for a policy that never keeps the bound.
    """
    peaks: dict[str, float] = {}
    for point in points:
        is_within = point["latency_s"]["p90"] <= within_s
        served = point["requests_per_s"] if is_within else 0.0
        peaks[point["policy"]] = max(peaks.get(point["policy"], 0.0), served)
    return peaks


def compared(
    points: Sequence[Mapping[str, Any]], ours: str, *, without: Sequence[str] = ()
) -> dict[str, Any]:
    """Return our policy beside the others on one workload.

    Args:
      points: of all policies; `rate` is None for all requests at once.
      without: policies that are no baselines.

    Returns:
      `peak_over`: our peak over that of each other policy; `best`: the baseline with the highest
      peak; `peaks_within_per_s`, `within_over`, `best_within`: the same among the points whose p90
      latency is at most `BOUND_S`, with None in place of a ratio to a policy that has none;
      `p90_lower_by`: the share by which our p90 latency is lower than that of each other policy, at
      the highest rate of at most half of its peak, which the thesis calls moderate load; None if
      there is no such rate.
    """
    peaks, within = peaks_of(points), peaks_of(points, BOUND_S)
    others = [name for name in peaks if name != ours]
    baselines = [name for name in others if name not in without]
    return {
        "peaks_per_s": peaks,
        "best": max(baselines, key=peaks.__getitem__, default=None),
        "peak_over": {name: peaks[ours] / peaks[name] for name in others},
        "peaks_within_per_s": within,
        "within_over": {
            name: within[ours] / within[name] if within[name] else None for name in others
        },
        "best_within": max(baselines, key=within.__getitem__, default=None),
        "p90_lower_by": {name: _lower_by(points, ours, name, peaks[name]) for name in others},
    }


def _lower_by(
    points: Sequence[Mapping[str, Any]], ours: str, other: str, peak: float
) -> float | None:
    p90 = {
        (point["policy"], point["rate"]): point["latency_s"]["p90"]
        for point in points
        if point["rate"] is not None and point["rate"] <= peak / 2
    }
    rates = [rate for name, rate in p90 if name == other and (ours, rate) in p90]
    if not rates:
        return None
    rate = max(rates)
    return 1 - p90[ours, rate] / p90[other, rate]
