"""A made-up table of step times, and plans to compare with it."""

from __future__ import annotations

from typing import Any

from jaxserve.core.config import EngineConfig
from jaxserve.planning import StepTimes
from jaxserve.planning.step_times import Curve, Origin
from jaxserve.scheduling.plan import Row, StepPlan

CONFIG = EngineConfig(
    page_size=8,
    num_pages=200,
    max_slots=8,
    max_context=256,
    max_step_tokens=128,
    max_decode_iterations=4,
    num_host_pages=4,
)


def made_up(config: EngineConfig = CONFIG) -> StepTimes:
    """Return a table with straight lines and round numbers that all differ."""
    return StepTimes(
        origin=Origin(
            model={"num_layers": 2, "sliding_windows": (None, None), "dtype": "float32"},
            device={"platform": "cpu", "host_cpu": "an abacus"},
            config=config,
            versions={"jax": "0"},
        ),
        decode_s={w: Curve(((0.0, w), (1000.0, w + 2.0))) for w in config.slot_buckets},
        loop_s={w: 0.25 + w for w in config.slot_buckets},
        prefill_s={t: Curve(((0.0, t), (1000.0, t + 1.0))) for t in config.token_buckets},
        encode_s={
            t: Curve(((0.0, t / 2), (1000.0, t / 2 + 0.5)))
            for t in (config.token_buckets if config.has_encoder else ())
        },
        head_s={r: r / 16 for r in config.head_buckets},
        edit_s=0.125,
        move_s=0.5,
        admit_s=0.375,
        page_out_s=0.25,
        page_in_s=0.125,
        plan_s=0.01,
        submit_s=0.02,
    )


def plan(rows: tuple[Row, ...], **fields: Any) -> StepPlan:
    """Return a plan of these rows; by default a mixed step."""
    nothing = ("swaps_out", "swaps_in", "releases", "moves", "admissions", "page_updates")
    defaults: dict[str, Any] = {name: () for name in nothing}
    defaults |= {"index": 0, "num_iterations": 1, "window_start": 0, "window_size": 0}
    return StepPlan(**{**defaults, "rows": rows, **fields})
