"""Step times like those of a small model on a CPU: plans for them, and what they serve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InfeasibleBoundError
from jaxserve.core.request import Timing
from jaxserve.execution.step_cost import StepCost
from jaxserve.planning import GroupTimes, StepTimes, simulate
from jaxserve.planning.schedules import (
    LatencyBounds,
    RRAPlanner,
    SchedulePlan,
    TaskLengths,
    lengths_of,
)
from jaxserve.planning.schedules.adaptation import AdaptingPilot
from jaxserve.planning.schedules.planner import SchedulePlanner
from jaxserve.planning.step_times import Curve
from jaxserve.scheduling.admission import OnDemand
from jaxserve.scheduling.order import FCFS
from jaxserve.scheduling.policy import IterationShape, Policy
from jaxserve.scheduling.retention import Stateless
from jaxserve.workload import WorkloadItem
from tests.planning.step_times import made_up

CONFIG = EngineConfig(
    page_size=16,
    num_pages=2000,
    max_slots=32,
    max_context=512,
    max_step_tokens=256,
    max_decode_iterations=8,
)


def like_a_small_model(config: EngineConfig = CONFIG) -> StepTimes:
    """Return a table, in seconds."""
    return replace(
        made_up(config),
        decode_s={
            w: Curve(((0.0, 4e-3 + 1e-3 * w), (1e4, 5e-3 + 1e-3 * w))) for w in config.slot_buckets
        },
        loop_s={w: 1e-3 for w in config.slot_buckets},
        prefill_s={
            t: Curve(((0.0, 4e-3 + 4e-4 * t), (1e4, 6e-3 + 4e-4 * t))) for t in config.token_buckets
        },
        encode_s={
            t: Curve(((0.0, 2e-3 + 3e-4 * t), (1e4, 3e-3 + 3e-4 * t)))
            for t in (config.token_buckets if config.has_encoder else ())
        },
        head_s={r: 1e-4 * r for r in config.head_buckets},
        edit_s=2e-4,
        move_s=2e-4,
        admit_s=2e-4,
        plan_s=2e-4,
        submit_s=2e-4,
    )


GROUPS = GroupTimes(
    groups=(like_a_small_model(), like_a_small_model()), handover_s=1e-3, page_s=2e-4
)


def served(
    lengths: Sequence[tuple[int, int]],
    shape: IterationShape,
    cost: StepCost,
    config: EngineConfig = CONFIG,
    pilot: AdaptingPilot | None = None,
) -> list[Timing]:
    """Return the times of answers that all wait, in the simulation with the real scheduler."""
    run = simulate(
        [WorkloadItem(prompt_token_ids=(1,) * i, num_output_tokens=o) for i, o in lengths],
        Policy("served", OnDemand(), FCFS(), shape, Stateless()),
        config,
        cost,
        pilot=pilot,
        progress=False,
    )
    return [completion.timing for completion in run.completions]


def rate(timings: Sequence[Timing]) -> float:
    """Return the answers per second of the middle third of answers that all wait."""
    ends = np.sort([timing.finished_s or 0.0 for timing in timings])
    low, high = len(ends) // 3, 2 * len(ends) // 3
    return (high - low) / (ends[high] - ends[low])


def spent_s(timings: Sequence[Timing]) -> np.ndarray:
    """Return the seconds from admission to end of each answer."""
    return np.array([(each.finished_s or 0.0) - (each.admitted_s or 0.0) for each in timings])


def lowest_s(planner: SchedulePlanner, lengths: TaskLengths, name: str = "latency_s") -> float:
    """Return the lowest bound of this name that a plan keeps."""
    with pytest.raises(InfeasibleBoundError) as refused:
        planner.plan(lengths, LatencyBounds(**{name: 1e-9}), num_lengths=300)
    return refused.value.lowest[name]


def plan_rra(
    times: StepTimes,
    config: EngineConfig,
    lengths: Sequence[tuple[int, int]],
    latency_bound_s: float,
    *,
    first_token_bound_s: float = math.inf,
    token_bound_s: float = math.inf,
) -> SchedulePlan:
    """Return the plan of an engine's RRA schedules; see `RRAPlanner`."""
    bounds = LatencyBounds(
        latency_s=latency_bound_s, first_token_s=first_token_bound_s, token_s=token_bound_s
    )
    planner = RRAPlanner.measured(times, lambda: config)
    return planner.plan(lengths_of(lengths), bounds, num_lengths=len(lengths))
