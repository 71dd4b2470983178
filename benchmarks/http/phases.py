"""Where the time to the first token goes: the client, the way to the engine, the engine, back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.common.repeats import Figures
from benchmarks.http.load import Seen

if TYPE_CHECKING:
    from jaxserve.engine.recorder import RequestRecord


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the mean."""
    found = {f"p{q}": float(np.percentile(seconds, q)) for q in (50, 99)}
    return {**found, "mean": float(np.mean(seconds))}


def phases(seen: Sequence[Seen], records: Sequence[RequestRecord]) -> Figures | None:
    """Return the seconds of each part of the time to the first token, in its order.

    `late_s` is the client's own: from the time at which a request should have been sent to that at
    which it was. `before_engine_s` lasts until the engine's clock says that the request arrived,
    `engine_s` until the engine had its first token, and `after_engine_s` until the client had it.

    All of them read `time.perf_counter`, which is one clock for all processes of a machine.

    Returns:
      Percentiles and means over the requests; None for the answers of another server.
    """
    timings = {record.request_id: record.timing for record in records}
    if any(one.request_id not in timings for one in seen):
        return None
    found: dict[str, list[float]] = {
        "late_s": [], "before_engine_s": [], "engine_s": [], "after_engine_s": []
    }  # fmt: skip
    for one in seen:
        times = timings[one.request_id]
        assert times.first_token_s is not None, "each answer has a token"
        arrived_s, first_s = times.arrival_s - one.at_s, times.first_token_s - one.at_s
        parts = (one.sent_s, arrived_s - one.sent_s, first_s - arrived_s, one.times_s[0] - first_s)
        for each, part_s in zip(found.values(), parts, strict=True):
            each.append(part_s)
    return {name: percentiles(seconds) for name, seconds in found.items()}
