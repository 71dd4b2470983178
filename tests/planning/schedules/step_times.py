"""Step times like those of a small model on a CPU, for plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from jaxserve.core.config import EngineConfig
from jaxserve.planning import StepTimes
from jaxserve.planning.schedules import LatencyBounds, RRAPlanner, SchedulePlan, lengths_of
from jaxserve.planning.step_times import Curve
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
