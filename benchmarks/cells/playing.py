"""One run of a policy: simulated, or on the device in real time."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np

from benchmarks.cells.applications import CellRequest, Simulated
from benchmarks.common.serving import raise_error
from jaxserve.cells.simulation import TaskCost
from jaxserve.core.metrics import spread

if TYPE_CHECKING:
    from jaxserve.cells import CellRuntime


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

    Requests that arrive in the first `warm_share` are excluded. `requests_per_s` counts requests of
    any arrival that ended between the first counted arrival and the last arrival, over that time;
    if there are none, as when all arrive at once, it is the number of requests over the total time.
    Latency is queueing (arrival to first task, as in 2.7.3) and computing (first task to end).

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
    """Return whether a policy serves less than arrives; a higher rate then adds no information."""
    return point["rate"] is not None and point["requests_per_s"] < SATURATED * point["rate"]


def peaks_of(points: Sequence[Mapping[str, Any]], within_s: float = math.inf) -> dict[str, float]:
    """Return each policy's highest served requests a second with a p90 latency within a bound.

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
    """Return our policy compared with the other ones on one workload.

    Args:
      points: of all policies; `rate` is None for all requests at once.
      without: policies that are not baselines.

    Returns:
      `peak_over`: our peak over that of each other policy; `best`: the baseline with the highest
        peak; `peaks_within_per_s`, `within_over`, `best_within`: the same among the points whose
        p90 latency is at most `BOUND_S`, with None for a ratio to a policy without such a point;
        `p90_lower_by`: the share by which our p90 latency is lower than that of each other policy,
        at the highest rate of at most half of its peak, which the thesis calls moderate load; None
        if there is no such rate.
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


_SPIN_S = 0.002


def simulate(
    model: Simulated,
    policy: Any,
    cost: TaskCost,
    requests: Sequence[CellRequest],
    arrivals: Sequence[float],
    *,
    num_workers: int = 1,
    max_in_flight: int = 2,
    warm_share: float = WARM_SHARE,
) -> dict[str, Any]:
    """Return the figures of a simulated run; the policy does not know the answers' lengths."""
    from jaxserve.cells.layout import CellLayout
    from jaxserve.cells.simulation import simulate_cells

    has_loop = any(cell.is_loop for cell in model.cells)
    done = simulate_cells(
        CellLayout(model.cells),
        [(at, model.unfold(one)) for at, one in zip(arrivals, requests, strict=True)],
        policy,
        cost,
        num_workers=num_workers,
        max_in_flight=max_in_flight,
        loop_length=decoder_length if has_loop else None,
    )
    served = _served(done.completions)
    return {**figures_of(served, warm_share=warm_share), **_counts(done.stats)}


def decoder_length(graph: Any, node: int) -> int:
    """Return the steps of a node, its first word if it is a decoder; 1 for other nodes."""
    return int(graph.words[node][0]) if graph.graph.max_steps[node] > 1 else 1


def serve(
    rt: CellRuntime, requests: Sequence[CellRequest], arrivals: Sequence[float]
) -> dict[str, Any]:
    """Return the figures of a run on the device, in real time, from `serve_all`."""
    before = copy(rt.stats())
    served, _ = serve_all(rt, requests, arrivals)
    return {**figures_of(served), **_counts(rt.stats(), before)}


def serve_all(
    rt: CellRuntime, requests: Sequence[CellRequest], arrivals: Sequence[float]
) -> tuple[list[Served], list[Any]]:
    """Submit requests at their times; return the times of each request, and the completions.

    Times are seconds after the start. Latency counts from the planned arrival, so a late submission
    counts as queueing.

    Raises:
      JaxserveError: the error of the first request that failed.
    """
    pending = []
    begin_s = time.perf_counter()
    for at_s, request in zip(arrivals, requests, strict=True):
        while (left_s := begin_s + at_s - time.perf_counter()) > 0:
            time.sleep(left_s if left_s < _SPIN_S else left_s - _SPIN_S)
        pending.append(rt.submit(request))
    done = [one.result() for one in pending]
    raise_error(done)
    served = [
        Served(at_s, one.begin_s - begin_s, one.end_s - begin_s)
        for at_s, one in zip(arrivals, _served(done), strict=True)
    ]
    return served, done


def _served(completions: Sequence[Any]) -> list[Served]:
    found = []
    for completion in completions:
        timing = completion.timing
        assert timing.admitted_s is not None and timing.finished_s is not None
        found.append(Served(timing.arrival_s, timing.admitted_s, timing.finished_s))
    return found


_COUNTERS = ("num_tasks", "num_nodes", "num_padding", "scheduling_s", "submitting_s")


def _counts(stats: Any, before: Any = None) -> dict[str, Any]:
    own = {name: getattr(stats, name) - getattr(before, name, 0) for name in _COUNTERS}
    return {**own, "average_batch": own["num_nodes"] / own["num_tasks"]}
