"""The serving loop of a peer: batches of arrived requests, one after the other, in real time.

It uses only the standard library, since every peer runs in its own environment.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

_SPIN_S = 0.001
# Values of each answer that are compared.
SHOWN = 8


class Queue:
    """Waiting requests, by their numbers, in buckets of similar lengths that take turns.

    Args:
      size: most requests of a batch.
      lengths: of all requests; without them there is one bucket.
    """

    def __init__(self, size: int, lengths: Sequence[int] = (), width: int = 1):
        self._size = size
        self._lengths = lengths
        self._width = width
        self._waiting: dict[int, deque[int]] = {}
        self._last = -1

    def add(self, number: int) -> None:
        bucket = (self._lengths[number] - 1) // self._width if self._lengths else 0
        self._waiting.setdefault(bucket, deque()).append(number)

    def take(self) -> list[int]:
        """Remove and return the next batch, which may be empty: the first of a bucket."""
        order = sorted(bucket for bucket, waiting in self._waiting.items() if waiting)
        if not order:
            return []
        self._last = next((bucket for bucket in order if bucket > self._last), order[0])
        waiting = self._waiting[self._last]
        return [waiting.popleft() for _ in range(min(self._size, len(waiting)))]


def play(
    arrivals: Sequence[float], queue: Queue, run: Callable[[list[int]], Any]
) -> list[tuple[float, float]]:
    """Return (begin, end) of each request, in seconds after the start of the run.

    Args:
      arrivals: in increasing order.
      run: computes the requests with these numbers; it returns when they are done.
    """
    times = [(0.0, 0.0)] * len(arrivals)
    start_s = time.perf_counter()
    num_arrived = num_done = 0
    while num_done < len(arrivals):
        now_s = time.perf_counter() - start_s
        while num_arrived < len(arrivals) and arrivals[num_arrived] <= now_s:
            queue.add(num_arrived)
            num_arrived += 1
        batch = queue.take()
        if not batch:
            left_s = arrivals[num_arrived] - now_s
            time.sleep(max(0.0, left_s if left_s < _SPIN_S else left_s - _SPIN_S))
            continue
        run(batch)
        end_s = time.perf_counter() - start_s
        for number in batch:
            times[number] = now_s, end_s
        num_done += len(batch)
    return times


def settle() -> None:
    """Exempt existing objects from garbage collection, as servers do after their start.

    A full collection would scan the objects of all imported libraries while requests wait.
    """
    gc.collect()
    gc.freeze()


def read_job() -> dict[str, Any]:
    with open(sys.argv[1], encoding="utf-8") as file:
        return json.load(file)


def folded(tree: Any, leaf: Callable[[int], Any], pair: Callable[[Any, Any], Any]) -> Any:
    """Return what the pairs of a tree make of its leaves, from the leaves to the root."""
    done: list[Any] = []
    left_open = [tree]
    while left_open:
        part = left_open.pop()
        if part is None:
            right = done.pop()
            done.append(pair(done.pop(), right))
        elif isinstance(part, list):
            left_open += [None, part[1], part[0]]
        else:
            done.append(leaf(part))
    return done.pop()


def serve(
    job: dict[str, Any],
    begin_s: float,
    run: Callable[[list[int]], Any],
    values: dict[int, Any],
    queue: Queue | None = None,
) -> None:
    """Serve a job: a warm-up, the requests as they arrive, and the answer.

    Args:
      begin_s: when the process began, by `time.perf_counter`.
      run: computes the requests with these numbers, and puts their `values`.
      queue: makes the batches; by default of the first that wait.
    """
    count = len(job["requests"])
    run(list(range(min(4, count))))
    settle()
    startup_s = time.perf_counter() - begin_s
    times = play(job["arrivals"], queue or Queue(job["max_batch"]), run)
    answer(startup_s, times, [values[number] for number in range(count)])


def answer(
    startup_s: float, times: Sequence[tuple[float, float]], values: Sequence[Sequence[float]]
) -> None:
    """Print the times of each request, and the values on which systems must agree."""
    print(json.dumps({"startup_s": startup_s, "times": times, "values": values}))
