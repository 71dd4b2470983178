"""Engines on simulated devices, and what they serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.execution.step_cost import FlatCost
from jaxserve.predictor import LengthBuckets
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import get_policy
from jaxserve.workload import WorkloadItem

# Presets of others' orders and admissions, which `make test-all` sweeps.
PUBLISHED = (
    *("shortest_predicted", "tie", "uniboost", "mlfq", "vtc", "past_future"),
    *("ltr", "trail", "seer", "slos_serve", "cache_ttl"),
)
# Each step takes as many seconds as it has iterations.
SECOND = FlatCost(per_iteration_s=1.0, per_token_s=0.0)


def engine_of(
    policy: str | Policy,
    config: EngineConfig,
    clock: VirtualClock | None = None,
    *,
    wrap: Callable[[Any], Any] = lambda executor: executor,
    parts: dict[str, Any] | None = None,
    **device: Any,
) -> Engine:
    """Return an engine on a simulated device.

    Args:
      wrap: returns the executor that the engine drives.
      parts: of the engine, such as its disk.
      device: arguments of `SimulatedExecutor`.
    """
    clock = clock or VirtualClock()
    executor = wrap(SimulatedExecutor(config, clock, **device))
    return Engine(executor, get_policy(policy), clock, **(parts or {}))


def request_of(
    id: str,
    prompt: tuple[int, ...] = (1, 2, 3),
    arrival_s: float = 0.0,
    prediction: LengthPrediction | None = None,
    **params: Any,
) -> Request:
    """Return a request with these sampling parameters."""
    return Request(
        id=id,
        prompt=prompt,
        params=SamplingParams(**params),
        arrival_s=arrival_s,
        prediction=prediction,
    )


def item_of(
    num_output: int, arrival_s: float = 0.0, *, num_prompt: int = 3, **bounds: Any
) -> WorkloadItem:
    """Return an item whose answer ends at its limit."""
    return WorkloadItem(
        prompt_token_ids=(1,) * num_prompt,
        num_output_tokens=num_output,
        max_tokens=num_output,
        arrival_s=arrival_s,
        sampling=SamplingParams(**bounds),
    )


def certain(length: int, buckets: LengthBuckets) -> LengthPrediction:
    """Return a prediction of one bucket: that of this length."""
    return LengthPrediction(buckets, np.eye(buckets.num)[buckets.bucket_of(length)])


def run_to_end(engine: Engine) -> None:
    """Step until nothing is left, and check after each step that pages and slots add up."""
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
