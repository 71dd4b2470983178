"""The client of `benchmarks.http`, in its own process: sends requests at given times."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common.environment import ROOT
from benchmarks.common.processes import PeerError
from benchmarks.common.repeats import Figures
from jaxserve.core.metrics import spread
from jaxserve.workload.load import StreamClient, TimedAnswer, send_all, unanswered

if TYPE_CHECKING:
    from jaxserve.engine.recorder import RequestRecord


# Seconds after the last arrival within which every answer has to end.
LIMIT_S = 1800.0


def send(
    url: str, bodies: Sequence[dict[str, Any]], arrivals_s: Sequence[float]
) -> list[TimedAnswer]:
    """Send each body at its time on its own connection, and return the received tokens.

    Args:
      url: of an endpoint that streams token ids; or one that streams text and gives the number of
        tokens at the end (`stream_options.include_usage`), as OpenAI's completions do.

    Raises:
      PeerError: a request was not answered, or not within `LIMIT_S` seconds of the last arrival.
    """
    given = json.dumps({"url": url, "bodies": list(bodies), "arrivals_s": list(arrivals_s)})
    program = "from benchmarks.http.load import main; main()"
    limit_s = LIMIT_S + max(arrivals_s, default=0.0)
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            input=given,
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"not every answer came within {limit_s:g} s") from error
    if done.returncode:
        raise PeerError(f"the client failed: {done.stderr[-2000:]}")
    return [TimedAnswer(**each) for each in json.loads(done.stdout)]


def main() -> None:
    """Read the requests from stdin, and write the answers' times to stdout."""
    given = json.loads(sys.stdin.read())
    bodies = [json.dumps(body).encode() for body in given["bodies"]]
    answers = unanswered(len(bodies))
    client = StreamClient(given["url"])
    asyncio.run(send_all(client.send, bodies, given["arrivals_s"], answers))
    if failed := next((answer.error for answer in answers if answer.error), ""):
        sys.exit(failed)
    print(json.dumps([vars(answer) for answer in answers]))


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return the median, the 99th percentile and the mean; None without seconds."""
    return spread(seconds, (50, 99))


def phases(seen: Sequence[TimedAnswer], records: Sequence[RequestRecord]) -> Figures | None:
    """Return the seconds of each part of the time to the first token, in its order.

    `late_s` is the client's own delay, from a request's planned time to its sending.
    `before_engine_s` ends when the request arrives on the engine's clock, `engine_s` at the
    engine's first token, and `after_engine_s` when the client receives it.

    All of them read `time.perf_counter`, which is one clock for all processes of a machine.

    Returns:
      Percentiles and means over the requests; None for the answers of another server.
    """
    timings = {record.request_id: record.timing for record in records}
    if any(one.request_id not in timings for one in seen):
        return None
    ends = []  # of the parts of each request
    for one in seen:
        times = timings[one.request_id]
        assert times.first_token_s is not None, "each answer has a token"
        arrived_s, first_s = times.arrival_s - one.at_s, times.first_token_s - one.at_s
        ends.append((one.sent_s, arrived_s, first_s, one.times_s[0]))
    parts = np.diff(ends, prepend=0.0).T
    names = ("late_s", "before_engine_s", "engine_s", "after_engine_s")
    return {name: percentiles(part.tolist()) for name, part in zip(names, parts, strict=True)}
