"""Measurement of step times by running an executor on plans of every compiled shape.

Steps run with two in flight, as the engine submits them, and the measured time is from one step's
end to the next one's. So the table holds the time of a served step, with the load of the host, and
is not fitted to a workload.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from jaxserve.core.clock import Clock
from jaxserve.execution.protocol import Executor
from jaxserve.planning.origin import Origin
from jaxserve.planning.step_bench import SHORT_TOKENS, TIMED_STEPS, Measured, Shape, StepBench
from jaxserve.planning.step_times import StepTimes
from jaxserve.scheduling.plan import StepPlan

# A shape is timed repeatedly in a round for at least this long, so that short fluctuations of the
# machine's speed average out.
_SHAPE_S = 0.5
_MAX_REPEATS = 8


def measure(
    executor: Executor,
    origin: Origin,
    clock: Clock,
    *,
    group: int = 0,
    rounds: int = 2,
    progress: bool = True,
) -> StepTimes:
    """Time every shape in several rounds, and return the median of the rounds for each entry.

    Rounds spread each shape over the whole measurement, so that a slow drift of the machine's speed
    affects all entries alike. The executor must be idle; its slots are inert afterwards.

    Args:
      origin: origin of the returned table.
      clock: the executor's clock if it is simulated, otherwise a `WallClock`.
      group: the device group to time.
    """
    bench = StepBench(executor, clock, group)
    shapes = bench.shapes()
    tables: list[StepTimes] = []
    with tqdm(
        total=rounds * len(shapes), desc="timing steps", leave=False, delay=2, disable=not progress
    ) as bar:
        for _ in range(rounds):
            measured: Measured = defaultdict(lambda: defaultdict(list))
            for shape in shapes:
                bar.set_postfix_str(f"{shape.name} {shape.size}", refresh=False)
                measured[shape.name][shape.size].append((shape.positions, _repeated(shape, clock)))
                bar.update()
            tables.append(bench.table(origin, measured))
    bench.reset()
    return StepTimes.median(tables)


def measure_beside(executor: Executor, clock: Clock) -> tuple[float, ...]:
    """Return how many times as long a step of each device group takes beside one of the other.

    The first group computes prompts, and the second one a token for each slot. See `measure`.
    """
    benches = [StepBench(executor, clock, group) for group in range(executor.num_device_groups)]
    plans = [benches[0].steady_step(SHORT_TOKENS), *(each.steady_step(1) for each in benches[1:])]
    alone = [_step_s(executor, clock, [plan])[0] for plan in plans]
    beside = _step_s(executor, clock, plans)
    for bench in benches:
        bench.reset()
    return tuple(max(1.0, b / a) for a, b in zip(alone, beside, strict=True))


def _step_s(executor: Executor, clock: Clock, plans: Sequence[StepPlan]) -> list[float]:
    """Return the median seconds of each step, while all are submitted again and again."""
    lanes = [deque(executor.submit(plan) for _ in range(2)) for plan in plans]
    ends: list[list[float]] = [[] for _ in plans]
    while min(map(len, ends)) <= TIMED_STEPS:
        ready = [i for i, lane in enumerate(lanes) if lane[0].is_ready()]
        for i in ready:
            lanes[i].popleft().collect()
            ends[i].append(clock.now())
            lanes[i].append(executor.submit(plans[i]))
        if not ready:
            clock.wait()
    for lane in lanes:
        for handle in lane:
            handle.collect()
    return [statistics.median(np.diff(each).tolist()) for each in ends]


def _repeated(shape: Shape, clock: Clock) -> float:
    begin_s = clock.now()
    times = [shape.time()]
    while clock.now() - begin_s < _SHAPE_S and len(times) < _MAX_REPEATS:
        times.append(shape.time())
    return statistics.median(times)
