"""A made-up table of step times for tests."""

from __future__ import annotations

from jaxserve.core.config import EngineConfig
from jaxserve.planning import Origin, StepTimes
from jaxserve.planning.step_times import Curve

CONFIG = EngineConfig(
    page_size=8,
    num_pages=200,
    max_slots=8,
    max_context=256,
    max_step_tokens=128,
    max_decode_iterations=4,
)


def made_up(config: EngineConfig = CONFIG) -> StepTimes:
    """Straight lines and round numbers, each different from the others."""
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
        head_s={r: r / 16 for r in config.head_buckets},
        edit_s=0.125,
        move_s=0.5,
        admit_s=0.375,
        plan_s=0.01,
        submit_s=0.02,
    )
