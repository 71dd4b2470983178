"""The S3 paper's models on its GPU, simulated, and predictors that are imitated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from benchmarks.common.counters import average_batch
from benchmarks.common.repeats import Figures
from jaxserve.core.metrics import summarise
from jaxserve.core.prediction import LengthPrediction
from jaxserve.planning import Simulation, simulate
from jaxserve.planning.step_roofline import A100, ModelShape, RooflineCost
from jaxserve.predictor import LengthBuckets
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.retention import Stateless
from jaxserve.workload import WorkloadItem
from jaxserve.workload.items import with_arrivals

# Tokens of the longest sequence, which ORCA reserves for each.
MAX_CONTEXT = 2048
PAGE_TOKENS = 16
# Section 4 has PCIe 4.0 x8.
_GPU = replace(A100, link_bytes_per_s=15.75e9)
# Table 1, as printed.
MODELS = {
    "GPT-J": ModelShape(num_params=6e9, num_layers=28, hidden_size=5120),
    "LLAMA 13B": ModelShape(num_params=13e9, num_layers=40, hidden_size=4096),
    "GPT-NEOX": ModelShape(num_params=20e9, num_layers=44, hidden_size=6144),
    "LLAMA 33B": ModelShape(num_params=30e9, num_layers=60, hidden_size=6656),
}
GPT3 = ModelShape(num_params=175e9, num_layers=96, hidden_size=12288)
NUM_GPUS = (6, 8, 10)


def machines() -> Iterator[tuple[str, RooflineCost]]:
    """Yield name and step costs of every model on its GPUs."""
    for name, model in MODELS.items():
        yield name, RooflineCost(model=model, roofs=_GPU, page_tokens=PAGE_TOKENS)
    for count in NUM_GPUS:
        yield (
            f"GPT3, {count} GPUs",
            RooflineCost(model=GPT3, roofs=_GPU, page_tokens=PAGE_TOKENS, num_stages=count),
        )


# Section 4.1: seconds a token that an English reader takes.
SLO_S = 0.1875


@final
@dataclass(frozen=True)
class Run:
    """A policy, a machine by its step costs, requests and their predicted lengths.

    With another context, memory is that share of the machine's. The policy knows the cost of swaps
    only if it measures them.
    """

    policy: str
    cost: RooflineCost
    items: Sequence[WorkloadItem]
    predictions: Sequence[LengthPrediction | None]
    max_slots: int
    max_context: int = MAX_CONTEXT
    measures_swaps: bool = False

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
        within = sum(
            completion.timing.latency_s <= SLO_S * len(completion.token_ids)
            for completion in done.completions
            if completion.timing.latency_s is not None
        )
        return {
            "rate": rate,
            "share_within": within / len(self.items),
            "requests_within_per_s": within / done.wall_s,
        }

    def _simulated(self, items: Sequence[WorkloadItem]) -> Simulation:
        """Simulate with as many pages as fit next to the weights, and as many on the host."""
        share = self.max_context / MAX_CONTEXT
        num_pages = int(share * self.cost.kv_tokens) // PAGE_TOKENS
        config = self.cost.config(
            num_pages=num_pages,
            num_host_pages=num_pages,
            max_slots=self.max_slots,
            max_context=self.max_context,
            max_step_tokens=max(2048, self.max_slots),
        )
        # Without retention: the requests share no prefix.
        policy = replace(PRESETS[self.policy], retention=Stateless())
        return simulate(
            items,
            policy,
            config,
            self.cost,
            predictions=self.predictions,
            swap_costs=self.cost.swap_costs() if self.measures_swaps else None,
            label=self.policy,
        )


def imitated(
    items: Sequence[WorkloadItem], accuracy: float, seed: int, max_context: int = MAX_CONTEXT
) -> list[LengthPrediction | None]:
    """Return predictions that are right at a rate of `accuracy`, and otherwise one bucket off."""
    rng = np.random.default_rng(seed)
    buckets = LengthBuckets.equal_width(max_context)
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
