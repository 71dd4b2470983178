"""Seconds of one call in PyTorch, layer after layer, so that every call finds its pages cold."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

CALLS = 20
_REPEATS = 9

# Number of a layer -> output.
Attend = Callable[[int], torch.Tensor]


def measure(attend: Attend, layers: int, device: torch.device) -> dict[str, Any]:
    """Return `seconds` of a call, and how it was `timed`.

    On a GPU, events around replays of a graph of calls give the time. Calls that cannot be captured
    are timed themselves; then `reason` says why, and small shapes wait for the host.
    """

    def chain() -> None:
        for i in range(CALLS):
            attend(i % layers)

    chain()
    if device.type != "cuda":
        return {"seconds": _host_s(chain) / CALLS, "timed": "by the host"}
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
    except RuntimeError as error:
        torch.cuda.synchronize()
        return {
            "seconds": _events_s(chain) / CALLS,
            "timed": "events",
            "reason": f"no graph: {str(error).splitlines()[0]}",
        }
    return {"seconds": _events_s(graph.replay) / CALLS, "timed": "events around a graph"}


def _host_s(run: Callable[[], None]) -> float:
    begin_s = time.perf_counter()
    run()
    return time.perf_counter() - begin_s


def _events_s(run: Callable[[], None]) -> float:
    """Return the median of single runs, after one that is not timed."""
    run()
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)
