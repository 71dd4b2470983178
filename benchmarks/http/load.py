"""The client of `benchmarks.http`, in its own process: sends requests at given times."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final
from urllib.parse import SplitResult, urlsplit

import numpy as np

from benchmarks.common.environment import ROOT
from benchmarks.common.processes import PeerError
from benchmarks.common.repeats import Figures

if TYPE_CHECKING:
    from jaxserve.engine.recorder import RequestRecord


# Seconds after the last arrival within which every answer has to end.
LIMIT_S = 1800.0


@final
@dataclass
class Seen:
    """When the tokens of one answer arrived, in seconds after the request's planned time.

    Attributes:
      at_s: its planned time, by `time.perf_counter`.
      sent_s: when it was sent, in seconds after that.
      request_id: the server's id of the request; "" if it gives none.
    """

    times_s: list[float]
    num_tokens: int
    end_s: float
    at_s: float = 0.0
    sent_s: float = 0.0
    request_id: str = ""


def send(url: str, bodies: Sequence[dict[str, Any]], arrivals_s: Sequence[float]) -> list[Seen]:
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
    return [Seen(**each) for each in json.loads(done.stdout)]


def main() -> None:
    """Read the requests from stdin, and write the received tokens to stdout."""
    given = json.loads(sys.stdin.read())
    seen = asyncio.run(_send_all(**given))
    print(json.dumps([vars(each) for each in seen]))


async def _send_all(url: str, bodies: list[Any], arrivals_s: list[float]) -> list[Seen]:
    where = urlsplit(url)
    contents = [json.dumps(body).encode() for body in bodies]
    begun_s = time.perf_counter() + 0.1
    return await asyncio.gather(
        *(
            _send_one(where, content, begun_s + arrival_s)
            for content, arrival_s in zip(contents, arrivals_s, strict=True)
        )
    )


async def _send_one(where: SplitResult, body: bytes, at_s: float) -> Seen:
    await asyncio.sleep(at_s - time.perf_counter())
    reader, writer = await asyncio.open_connection(where.hostname, where.port or 80)
    # Recorded before it is written: the server may receive it before this process continues.
    seen = Seen([], 0, 0.0, at_s, time.perf_counter() - at_s)
    writer.write(
        b"POST %s HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % (where.path.encode(), len(body))
    )
    writer.write(body)
    usage, lines = None, []
    async for line in reader:
        lines.append(line)
        if line.startswith(b"data: {"):
            now_s = time.perf_counter() - at_s
            found = json.loads(line[6:])
            choices = found.get("choices", ())
            if any(choice.get("token_ids") or choice.get("text") for choice in choices):
                seen.times_s.append(now_s)
            seen.request_id = found.get("request_id") or found.get("id") or seen.request_id
            seen.num_tokens += sum(len(choice.get("token_ids") or ()) for choice in choices)
            usage = found.get("usage") or usage
    writer.close()
    if b"data: [DONE]\n" not in lines:
        raise RuntimeError(b"".join(lines)[-500:].decode(errors="replace"))
    if not seen.num_tokens and usage:  # of the last event: text has no token ids
        seen.num_tokens = usage["completion_tokens"]
    seen.end_s = time.perf_counter() - at_s
    return seen


def percentiles(seconds: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Return the median, the 99th percentile and the mean."""
    found = {f"p{q}": float(np.percentile(seconds, q)) for q in (50, 99)}
    return {**found, "mean": float(np.mean(seconds))}


def phases(seen: Sequence[Seen], records: Sequence[RequestRecord]) -> Figures | None:
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
    return {name: percentiles(part) for name, part in zip(names, parts, strict=True)}
