"""The client of `benchmarks.http`, in a process of its own: sends requests at given times."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

ROOT = Path(__file__).parents[2]


@final
@dataclass
class Seen:
    """When the tokens of one answer came, in seconds after the request should have been sent."""

    times_s: list[float]
    num_tokens: int
    end_s: float


def send(url: str, bodies: Sequence[dict[str, Any]], arrivals_s: Sequence[float]) -> list[Seen]:
    """Send each body at its time on a connection of its own, and return what came.

    Raises:
      RuntimeError: a request was not answered.
    """
    given = json.dumps({"url": url, "bodies": list(bodies), "arrivals_s": list(arrivals_s)})
    program = "from benchmarks.http.load import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], input=given, capture_output=True, text=True, cwd=ROOT,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the client failed: {done.stderr[-2000:]}")
    return [Seen(**each) for each in json.loads(done.stdout)]


def main() -> None:
    """Read the requests from stdin, and write what came to stdout."""
    given = json.loads(sys.stdin.read())
    seen = asyncio.run(_send_all(given["url"], given["bodies"], given["arrivals_s"]))
    print(json.dumps([vars(each) for each in seen]))


async def _send_all(url: str, bodies: list[Any], arrivals_s: list[float]) -> list[Seen]:
    host, _, port = url.removeprefix("http://").partition(":")
    begun_s = time.perf_counter() + 0.1
    return await asyncio.gather(
        *(
            _send_one(host, int(port), json.dumps(body).encode(), begun_s + arrival_s)
            for body, arrival_s in zip(bodies, arrivals_s, strict=True)
        )
    )


async def _send_one(host: str, port: int, body: bytes, at_s: float) -> Seen:
    await asyncio.sleep(at_s - time.perf_counter())
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(
        b"POST /inference/v1/generate HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    writer.write(body)
    times_s, num_tokens, lines = [], 0, []
    async for line in reader:
        lines.append(line)
        if line.startswith(b"data: {"):
            found = json.loads(line[6:])
            num_new = sum(len(choice["token_ids"]) for choice in found.get("choices", ()))
            if num_new:
                times_s.append(time.perf_counter() - at_s)
                num_tokens += num_new
    writer.close()
    if b"data: [DONE]\n" not in lines:
        raise RuntimeError(b"".join(lines)[-500:].decode(errors="replace"))
    return Seen(times_s, num_tokens, time.perf_counter() - at_s)
