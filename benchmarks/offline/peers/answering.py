"""The frame of every engine's script; scripts in their own environments import it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

_POLL_S = 0.05

# Returns the tokens of requests that are submitted at once.
Answers = Callable[[list[dict]], list[list[int]]]


def main(opened: Callable[[dict], AbstractContextManager[Answers]], *, warms_up: bool) -> None:
    """Answer the requests of a job, `python SCRIPT JOB.json`, and print one JSON object.

    What the engine itself prints goes to stderr.

    Args:
      opened: starts the engine for a job; imports that take time belong to it.
      warms_up: whether a short request belongs to the start.
    """
    begin_s = time.perf_counter()
    stdout = os.dup(1)
    os.dup2(2, 1)
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    with opened(job) as answers:
        if warms_up:
            answers([{"prompt": [1, 2, 3], "num_output_tokens": 2}])
        result = {"startup_s": time.perf_counter() - begin_s, **timed(answers, job)}
    with os.fdopen(stdout, "w") as printed:
        print(json.dumps(result), file=printed)


def free_address() -> str:
    """Return the address of a free port of this machine, "http://127.0.0.1:PORT"."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def wait_for(server: subprocess.Popen, address: str, limit_s: float) -> None:
    """Wait until a server says that it is healthy.

    Raises:
      RuntimeError: it ended, or did not say so in time.
    """
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        try:
            urllib.request.urlopen(f"{address}/health", timeout=10).close()
            return
        except OSError:  # it does not listen yet, or it says 503 while it loads the model
            time.sleep(_POLL_S)
    raise RuntimeError(f"the server did not answer within {limit_s:g} s")


def timed(answers: Answers, job: dict) -> dict[str, Any]:
    """Return seconds and tokens of all requests, and of each of the job's smaller numbers."""

    def once(requests: list[dict]) -> dict[str, Any]:
        begin_s = time.perf_counter()
        token_ids = answers(requests)
        return {"wall_s": time.perf_counter() - begin_s, "token_ids": token_ids}

    fewer = [once(job["requests"][:number]) for number in job["fewer"]]
    return {**once(job["requests"]), "fewer": fewer}
