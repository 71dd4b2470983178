"""One policy on one model of the S3 paper, simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from benchmarks.common.counters import average_batch
from benchmarks.common.repeats import Figures
from benchmarks.s3.setup import MAX_CONTEXT, PAGE_TOKENS
from jaxserve.core.config import EngineConfig
from jaxserve.core.metrics import summarise
from jaxserve.core.prediction import LengthPrediction
from jaxserve.planning import RooflineCost, Simulation, simulate
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.retention.stateless import Stateless
from jaxserve.workload import WorkloadItem
from jaxserve.workload.arrivals import with_arrivals
from predictor import LengthBuckets

# Section 4.1: seconds a token that an English reader takes.
SLO_S = 0.1875


@final
@dataclass(frozen=True)
class Run:
    """A policy, a machine by its step costs, requests and their predicted lengths."""

    policy: str
    cost: RooflineCost
    items: Sequence[WorkloadItem]
    predictions: Sequence[LengthPrediction | None]
    max_slots: int

    def at_once(self) -> Figures:
        """Return the figures of all requests at once."""
        done = self._simulated(self.items)
        stats = done.stats
        pages_s = self.cost.swap_s(stats.num_pages_out + stats.num_pages_in)
        return {
            **summarise(done.completions, done.wall_s),
            "average_batch": average_batch(done.steps),
            "num_iterations": stats.num_iterations,
            "num_preemptions": stats.num_preemptions,
            "num_outgrown": stats.num_outgrown,
            "penalty_share": pages_s / done.wall_s,
        }

    def arriving(self, rate: float, seed: int) -> Figures:
        """Return how many requests are served within `SLO_S` a token at this rate of arrivals."""
        done = self._simulated(with_arrivals(self.items, f"poisson:{rate}", seed))
        within = [
            completion.timing.latency_s <= SLO_S * len(completion.token_ids)
            for completion in done.completions
            if completion.timing.latency_s is not None
        ]
        return {
            "rate": rate,
            "share_within": sum(within) / len(self.items),
            "requests_within_per_s": sum(within) / done.wall_s,
        }

    def _simulated(self, items: Sequence[WorkloadItem]) -> Simulation:
        return simulate(
            items,
            self._stateless(),
            self._config(),
            self.cost,
            predictions=self.predictions,
            label=self.policy,
        )

    def _stateless(self) -> Policy:
        """Return the policy without retention: the requests share no prefix."""
        return replace(PRESETS[self.policy], retention=Stateless())

    def _config(self) -> EngineConfig:
        """Return as many pages as fit beside the weights, and as many on the host."""
        num_pages = self.cost.kv_tokens // PAGE_TOKENS
        return EngineConfig(
            page_size=PAGE_TOKENS,
            num_pages=1 + num_pages,
            max_slots=self.max_slots,
            max_context=MAX_CONTEXT,
            max_step_tokens=max(2048, self.max_slots),
            max_decode_iterations=16,
            num_host_pages=num_pages,
        )


def imitated(
    items: Sequence[WorkloadItem], accuracy: float, seed: int
) -> list[LengthPrediction | None]:
    """Return predictions that are right at a rate of `accuracy`, and one bucket off otherwise."""
    rng = np.random.default_rng(seed)
    buckets = LengthBuckets.equal_width(MAX_CONTEXT)
    last = buckets.num - 1
    predictions: list[LengthPrediction | None] = []
    for item in items:
        bucket = int(buckets.bucket_of(item.num_output_tokens))
        if rng.random() > accuracy:
            step = int(rng.choice([-1, 1]))
            bucket += step if 0 <= bucket + step <= last else -step
        probabilities = np.full(buckets.num, (1.0 - accuracy) / last)
        probabilities[bucket] = accuracy
        predictions.append(LengthPrediction(buckets, probabilities))
    return predictions
