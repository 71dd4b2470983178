"""Measurement of step times by running an executor on plans of every compiled shape.

Steps run with two in flight, as the engine submits them, and the measured time is from one step's
end to the next one's. So the table holds the time of a served step, with the load of the host, and
is not fitted to a workload.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

import numpy as np
from tqdm import tqdm

from jaxserve.core.clock import Clock
from jaxserve.core.errors import InvalidConfigError
from jaxserve.execution.protocol import Executor, StepHandle
from jaxserve.planning.origin import Origin
from jaxserve.planning.step_bench import TIMED_STEPS, Measured, Shape, StepBench, planning
from jaxserve.planning.step_times import StepTimes
from jaxserve.scheduling.plan import StepPlan

# A shape is timed repeatedly in a round for at least this long, so that short fluctuations of the
# machine's speed average out.
_SHAPE_S = 0.5
_MAX_REPEATS = 8
# Rounds in which steps of two groups run alone and beside each other.
_BESIDE_ROUNDS = 3


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

    Raises:
      InvalidConfigError: `rounds` is not a whole number of at least 1.
    """
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
        raise InvalidConfigError(
            f"rounds={rounds!r} is not allowed; pass a whole number of at least 1"
        )
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

    The first group computes prompts, and the second one decode loops of all slots with as many
    iterations as take about as long: where groups take turns on something that they share, a step
    waits for one of the other, so that the result depends on how long that one is. Each group runs
    alone and beside the other in turn, for several rounds, whose median counts. Beside the other,
    the pages of prompts are handed over as soon as they are computed, and the host plans each step
    as it does while it serves, because that may take from the groups, too. The result is 1 where
    they share nothing, and steps take longer than to plan them.
    """
    prompts, decodes = (StepBench(executor, clock, group) for group in (0, 1))
    handover, plans = prompts.prompt_handover, planning(executor.config)

    def step_s(*lanes: Iterator[StepPlan]) -> list[float]:
        return _step_s(executor, clock, lanes)

    prompt_s = step_s(prompts.prompt_steps())[0]
    iteration_s = step_s(decodes.decode_loops(1))[0]
    num_iterations = round(prompt_s / max(iteration_s, 1e-9))
    rounds = []
    for _ in range(_BESIDE_ROUNDS):
        alone = [
            step_s(prompts.prompt_steps())[0],
            step_s(decodes.decode_loops(num_iterations))[0],
        ]
        lanes = prompts.prompt_steps(), decodes.decode_loops(num_iterations)
        beside = _step_s(executor, clock, lanes, handover, plans)
        rounds.append(np.divide(beside, alone))
    for bench in (prompts, decodes):
        bench.reset()
    return tuple(np.maximum(1.0, np.median(rounds, axis=0)).tolist())


def _step_s(
    executor: Executor,
    clock: Clock,
    plans: Sequence[Iterator[StepPlan]],
    handover: StepPlan | None = None,
    planned: Iterator[None] | None = None,
) -> list[float]:
    """Return the mean seconds from one step's end to the next one's, of each lane of steps.

    All lanes run at the same time, each with two steps in flight.

    Args:
      handover: follows each step of the first lane, unless the one before it goes on.
      planned: does the host's work for a step.
    """
    copying: StepHandle | None = None
    lanes = [deque(executor.submit(next(lane)) for _ in range(2)) for lane in plans]
    ends: list[list[float]] = [[] for _ in plans]
    end_s = clock.now() + _SHAPE_S
    while clock.now() < end_s or min(map(len, ends)) < 2 + TIMED_STEPS:
        ready = [i for i, lane in enumerate(lanes) if lane[0].is_ready()]
        for i in ready:
            lanes[i].popleft().collect()
            ends[i].append(clock.now())
            if planned is not None:
                next(planned)
            if copying is not None and copying.is_ready():
                copying.collect()
                copying = None
            if i == 0 and handover is not None and copying is None:
                copying = executor.submit(handover)
            lanes[i].append(executor.submit(next(plans[i])))
        if not ready:
            clock.wait()
    for lane in lanes:
        for handle in lane:
            handle.collect()
    if copying is not None:
        copying.collect()
    # The steps that were in flight before all lanes ran are not counted.
    return [(each[-1] - each[1]) / (len(each) - 2) for each in ends]


def _repeated(shape: Shape, clock: Clock) -> float:
    begin_s = clock.now()
    times = [shape.time()]
    while clock.now() - begin_s < _SHAPE_S and len(times) < _MAX_REPEATS:
        times.append(shape.time())
    return statistics.median(times)
