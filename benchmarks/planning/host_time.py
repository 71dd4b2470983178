"""One measurement of the host's time for a step, of the checkout that is on the path.

`python benchmarks/planning/host_time.py OPTIONS`, with OPTIONS in JSON, prints a JSON list of
points. It imports only jaxserve, and of it only what the compared commits have in common, so that
`benchmarks.planning` can run this very file against other checkouts.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

import numpy as np

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.predictor import LengthBuckets
from jaxserve.scheduling.presets import PRESETS

_PAGE_TOKENS = 32
_SHORT_CONTEXT = 1024
_MAX_OUTPUT_TOKENS = 256
# Pages of the pool for each slot: about as many as a sequence has on average, so that the memory
# limits admission.
_PAGES_A_SLOT = 5
# With a longer context, every n-th request has a prompt of at least half of it; the pool also has
# room for two of these, and prefill is in larger steps.
_LONG_EVERY = 500
_LONG_AT_ONCE = 2
_LONG_STEP_TOKENS = 8192
# Steps before the measurement, in which the slots fill.
_WARM_UP_STEPS = 40


class Timed:
    """A method of an object that adds its time to `spent_s` (elapsed) and `spent_cpu_s`."""

    def __init__(self, owner: Any, name: str):
        self.spent_s = self.spent_cpu_s = 0.0
        self._call = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any) -> Any:
        begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
        result = self._call(*args)
        self.spent_s += time.perf_counter() - begin_s
        self.spent_cpu_s += time.thread_time() - begin_cpu_s
        return result


def measure(
    policy: str, max_slots: int, num_waiting: int, num_steps: int, max_context: int = _SHORT_CONTEXT
) -> dict[str, Any]:
    """Time `num_steps` steps with full slots and a constant number of waiting requests.

    A request arrives for each that ends. Returned are median, 99th percentile and maximum, in
    milliseconds a step, of planning (`planning_ms`) and of the host's whole work without the
    simulated device: planning, records, applying results (`host_ms`). `planning_cpu_ms` and
    `host_cpu_ms` are CPU time, which other work on the machine changes less.
    """
    is_long = max_context > _SHORT_CONTEXT
    num_pages = _PAGES_A_SLOT * max_slots
    num_pages += _LONG_AT_ONCE * (max_context // _PAGE_TOKENS) if is_long else 0
    config = EngineConfig(
        page_size=_PAGE_TOKENS,
        num_pages=1 + num_pages,
        num_host_pages=_PAGES_A_SLOT * max_slots,
        max_slots=max_slots,
        max_context=max_context,
        max_step_tokens=_LONG_STEP_TOKENS if is_long else max(512, max_slots),
        restore="prefetch",  # as on every platform (`execution.sizes`)
    )
    clock = VirtualClock()
    executor = SimulatedExecutor(config, clock, reads_context=False)
    submitted = Timed(executor, "submit")
    engine = Engine(executor, PRESETS[policy], clock)
    requests = _Requests(max_context if is_long else None)
    for _ in range(max_slots + num_waiting):
        engine.add(requests.next(clock.now()))
    planned = Timed(engine.scheduler, "plan")
    # The requests, added all at once, would be new to the garbage collector.
    gc.collect()
    planning_s, planning_cpu_s, host_s, host_cpu_s = [], [], [], []
    for number in range(_WARM_UP_STEPS + num_steps):
        planned_s = engine.stats.planning_s
        submitted.spent_s = submitted.spent_cpu_s = planned.spent_cpu_s = 0.0
        begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
        news = engine.step()
        took_s, took_cpu_s = time.perf_counter() - begin_s, time.thread_time() - begin_cpu_s
        if number >= _WARM_UP_STEPS:
            planning_s.append(engine.stats.planning_s - planned_s)
            planning_cpu_s.append(planned.spent_cpu_s)
            host_s.append(took_s - submitted.spent_s)
            host_cpu_s.append(took_cpu_s - submitted.spent_cpu_s)
        for each in news:
            if each.sequence.finish_reason:
                engine.add(requests.next(clock.now()))
    return {
        "policy": policy,
        "max_slots": max_slots,
        "num_waiting": num_waiting,
        "max_context": max_context,
        "num_steps": num_steps,
        "planning_ms": _milliseconds(planning_s),
        "planning_cpu_ms": _milliseconds(planning_cpu_s),
        "host_ms": _milliseconds(host_s),
        "host_cpu_ms": _milliseconds(host_cpu_s),
        "num_preemptions": engine.stats.num_preemptions,
    }


class _Requests:
    """Random requests that differ in prompt, answer length, and predicted length.

    Args:
      max_context: of the long requests; None for short requests only.
    """

    def __init__(self, max_context: int | None) -> None:
        self._rng = np.random.default_rng(0)
        self._buckets = LengthBuckets.equal_width(_MAX_OUTPUT_TOKENS)
        self._num = 0
        self._longest = (max_context or 0) - _MAX_OUTPUT_TOKENS
        self._tokens: tuple[int, ...] = ()
        if max_context is not None:
            self._tokens = tuple(self._rng.integers(1, 1000, 2 * max_context).tolist())

    def next(self, now_s: float) -> Request:
        rng = self._rng
        self._num += 1
        length = int(rng.integers(16, _MAX_OUTPUT_TOKENS))
        weights = rng.random(self._buckets.num)
        weights[int(self._buckets.bucket_of(length))] += self._buckets.num
        return Request(
            id=str(self._num),
            prompt=self._prompt(),
            params=SamplingParams(
                max_tokens=_MAX_OUTPUT_TOKENS, forced_length=length, ignore_eos=True
            ),
            arrival_s=now_s,
            prediction=LengthPrediction(self._buckets, weights / weights.sum()),
        )

    def _prompt(self) -> tuple[int, ...]:
        rng = self._rng
        if self._tokens and self._num % _LONG_EVERY == 1:
            start = int(rng.integers(self._longest))
            return self._tokens[
                start : start + int(rng.integers(self._longest // 2, self._longest))
            ]
        return tuple(rng.integers(1, 1000, int(rng.integers(16, 128))).tolist())


def _milliseconds(times_s: list[float]) -> dict[str, float]:
    times = 1e3 * np.asarray(times_s)
    p50, p99 = np.percentile(times, [50, 99])
    return {"p50": float(p50), "p99": float(p99), "max": float(times.max())}


def main() -> None:
    """Measure every combination of the options in the first argument, and print the points."""
    options = json.loads(sys.argv[1])
    points = [
        measure(policy, max_slots, num_waiting, options["steps"], max_context)
        for policy in options["policies"]
        for max_context in options["contexts"]
        for max_slots in options["slots"]
        for num_waiting in options["waiting"]
    ]
    print(json.dumps(points))


if __name__ == "__main__":
    main()
