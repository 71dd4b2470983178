"""Idle time of a GPU in a run, from the gaps between kernels in a trace."""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import jax
import numpy as np
from jax.profiler import ProfileData

_NUM_KERNELS = 12
# Between kernels of one step the device waits for the next launch; between steps, for the host.
_LONG_GAP_NS = 20_000


@final
@dataclass(frozen=True)
class Event:
    """A kernel or a copy on a device."""

    name: str
    start_ns: float
    duration_ns: float


def trace(run: Callable[[], object]) -> dict[str, Any]:
    """Trace `run`, which waits for its own results, and return `summarise` of the trace.

    Raises:
      NotImplementedError: the trace has no events of a GPU.
    """
    with tempfile.TemporaryDirectory(prefix="jaxserve-trace-") as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        events = list(device_events(ProfileData.from_file(str(path))))
    if not events:
        raise NotImplementedError("there is no GPU in the trace")
    return summarise(events)


def device_events(profile: Any) -> Iterable[Event]:
    """Yield every event on the streams of the first GPU of a `ProfileData`."""
    for plane in profile.planes:
        if plane.name.startswith("/device:GPU:0"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        yield Event(event.name, event.start_ns, event.duration_ns)


def summarise(events: list[Event]) -> dict[str, Any]:
    """Return shares of the time from the start of the first event to the end of the last.

    `idle_share` is the time without a kernel; `long_gap_share` the part of it in gaps of 20 us and
    more, as between steps; `kernels` are those that took most of the time, seconds and calls.
    """
    start = np.asarray([event.start_ns for event in events])
    order = np.argsort(start, kind="stable")
    start = start[order]
    end = start + np.asarray([event.duration_ns for event in events])[order]
    latest = np.maximum.accumulate(end)
    gaps = np.maximum(0.0, start[1:] - latest[:-1])
    span = latest[-1] - start[0]
    taken: defaultdict[str, float] = defaultdict(float)
    calls = Counter(event.name for event in events)
    for event in events:
        taken[event.name] += event.duration_ns
    longest = sorted(taken.items(), key=lambda item: -item[1])[:_NUM_KERNELS]
    return {
        "span_s": float(span) / 1e9,
        "num_events": len(events),
        "idle_share": float(gaps.sum() / span),
        "long_gap_share": float(gaps[gaps >= _LONG_GAP_NS].sum() / span),
        "kernels": [
            {"name": name[:120], "seconds": duration_ns / 1e9, "calls": calls[name]}
            for name, duration_ns in longest
        ],
    }
