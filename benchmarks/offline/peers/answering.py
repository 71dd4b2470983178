"""The measurements of every engine; scripts in their own environments import it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def timed(answers: Callable[[list[dict]], list[list[int]]], job: dict) -> dict[str, Any]:
    """Return the seconds and the tokens of all requests, and of each of the job's smaller numbers.

    `answers` returns the tokens of requests that are submitted at once.
    """

    def once(requests: list[dict]) -> dict[str, Any]:
        begin_s = time.perf_counter()
        token_ids = answers(requests)
        return {"wall_s": time.perf_counter() - begin_s, "token_ids": token_ids}

    fewer = [once(job["requests"][:number]) for number in job["fewer"]]
    return {**once(job["requests"]), "fewer": fewer}
