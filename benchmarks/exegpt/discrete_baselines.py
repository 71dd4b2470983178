"""ORCA's and vLLM's batches played by the real scheduler, as a check of their closed forms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from benchmarks.exegpt.discrete import Played, played_policy
from benchmarks.exegpt.iteration_level import MixedCost
from benchmarks.exegpt.served import Served
from jaxserve.core.errors import InvalidConfigError
from jaxserve.execution.step_cost import StepWork
from jaxserve.planning.schedules import Deployment, Phase, TaskLengths
from jaxserve.planning.schedules.pipeline import Pipeline
from jaxserve.scheduling.admission.max_length import MaxLength
from jaxserve.scheduling.admission.on_demand import OnDemand
from jaxserve.scheduling.iteration.unified import Unified
from jaxserve.scheduling.order.fcfs import FCFS
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.policy import Policy as ServingPolicy
from jaxserve.scheduling.retention.stateless import Stateless


@final
@dataclass(frozen=True)
class MixedStepCost:
    """Seconds of steps whose prompts and decoding rows are one pass, on one sharded stage.

    Raises:
      InvalidConfigError: the model has an encoder, or the cluster several machines.
    """

    deployment: Deployment

    def __post_init__(self) -> None:
        cluster = self.deployment.cluster
        if not self.deployment.model.is_decoder_only or max(cluster.degrees) < cluster.num_devices:
            raise InvalidConfigError(
                "mixed steps are those of decoder-only models on one machine; pass one"
            )

    def host_s(self, plan: StepPlan) -> float:
        return 0.0

    def device_s(self, work: StepWork) -> float:
        prompts = [row.num_tokens for row in work.plan.rows if row.num_tokens > 1]
        pairs = max(1, 2 * work.prefilled - sum(prompts))
        length = math.sqrt(pairs / len(prompts)) if work.prefilled else 1.0
        contexts = [row.start + 1 for row in work.plan.rows if row.num_tokens == 1]
        mean = sum(contexts) / max(1, len(contexts))
        seconds = 0.0
        for i, attended in enumerate(work.decoded or (0,)):
            has_prompts = bool(work.prefilled) and not i
            num_prompts, tokens = (len(prompts), sum(prompts)) if has_prompts else (0, 0)
            decoding = min(float(len(contexts)), attended / (mean + i)) if attended else 0.0
            if decoding or tokens:
                context = attended / decoding if decoding else 1.0
                seconds += self._pass_s(decoding, context, num_prompts, length, tokens)
        return seconds

    def _pass_s(
        self, decoding: float, context: float, num_prompts: int, length: float, tokens: int
    ) -> float:
        cluster = self.deployment.cluster
        num = np.array([cluster.num_devices])
        pipeline = Pipeline.of(
            num,
            num * (cluster.num_devices > 1),
            num,
            first_device=0,
            devices_per_machine=cluster.devices_per_machine,
        )
        through_s = pipeline.pass_s(
            MixedCost(self.deployment.cost, float(num_prompts), length),
            Phase.DECODE,
            self.deployment.model.num_decode_layers,
            batch=np.array([decoding]),
            length=context,
            num_tokens=np.array([decoding + tokens]),
            num_head_tokens=np.array([decoding + num_prompts]),
        )[1]
        return float(through_s[0])


def play_baseline(
    name: str, served: Served, index: int, deployment: Deployment, lengths: TaskLengths, seed: int
) -> Played:
    """Play a configuration of `orca` or `vllm` with sampled lengths."""
    is_orca = name == "orca"
    chunk = 0 if is_orca else int(np.broadcast_to(served.tokens, served.batch.shape)[index])
    admission = MaxLength() if is_orca else OnDemand()
    batch = int(served.batch[index])
    return played_policy(
        ServingPolicy(name, admission, FCFS(), Unified(chunk_tokens=chunk), Stateless()),
        MixedStepCost(deployment),
        deployment,
        lengths,
        num_slots=batch,
        num_filling=2 * batch,
        per_s=float(served.throughput[index]),
        seed=seed,
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
