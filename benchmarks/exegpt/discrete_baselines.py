"""ORCA's and vLLM's batches played by the real scheduler, as a check of their closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from benchmarks.exegpt.discrete import Played, played_policy
from benchmarks.exegpt.iteration_level import IterationLevel
from benchmarks.exegpt.served import Served
from jaxserve.planning.schedules import Deployment, TaskLengths
from jaxserve.planning.schedules.step_cost import MixedStepCost, pipeline_of
from jaxserve.scheduling.admission.max_length import MaxLength
from jaxserve.scheduling.admission.on_demand import OnDemand
from jaxserve.scheduling.iteration.unified import Unified
from jaxserve.scheduling.order.fcfs import FCFS
from jaxserve.scheduling.policy import Policy as ServingPolicy
from jaxserve.scheduling.retention.stateless import Stateless


def play_baseline(
    name: str, served: Served, index: int, deployment: Deployment, lengths: TaskLengths, seed: int
) -> Played:
    """Play a configuration of `orca` or `vllm` with sampled lengths."""
    is_orca = name == "orca"
    chunk = 0 if is_orca else int(np.broadcast_to(served.tokens, served.batch.shape)[index])
    admission = MaxLength() if is_orca else OnDemand()
    batch = int(served.batch[index])
    layout = IterationLevel(deployment, lengths).layout
    return played_policy(
        ServingPolicy(name, admission, FCFS(), Unified(chunk_tokens=chunk), Stateless()),
        MixedStepCost(deployment, pipeline_of(deployment, layout)),
        deployment,
        lengths,
        num_slots=batch,
        num_filling=2 * batch,
        per_s=float(served.throughput[index]),
        seed=seed,
        max_decode_iterations=1,
    )


def compared(
    name: str, served: Served, bound_s: float, deployment: Deployment, lengths: TaskLengths
) -> dict[str, Any] | None:
    """Return the estimate of the best configuration under a bound, and what it did when played.

    Without a bound, batches are too large to play in seconds, and None is returned.
    """
    index = served.best_at(bound_s)
    if index is None or math.isinf(bound_s):
        return None
    played = play_baseline(name, served, index, deployment, lengths, seed=0)
    p99_s = played.of_length(lengths.outputs.percentile(lengths.level))
    return {
        "batch": int(served.batch[index]),
        "estimated_per_s": float(served.throughput[index]),
        "per_s": played.throughput,
        "estimated_latency_s": float(served.latency_s[index]),
        "p99_length_s": None if math.isnan(p99_s) else p99_s,
        "within": played.within(bound_s),
        "num_preemptions": played.num_preemptions,
    }
