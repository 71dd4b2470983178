"""The S3 paper's tables 2 to 4 and figures 4d and 5, simulated: `python -m benchmarks.s3 --help`.

The paper's models on its GPU, as rooflines, under the scheduler, page pool and supervisor that
serve on a device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from benchmarks.common.counters import average_batch
from benchmarks.common.harness import Benchmark, option
from benchmarks.common.policies import load_predictor, predictions_of
from benchmarks.common.repeats import Figures
from benchmarks.common.workloads import is_tested_on
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
# Figures of tables 2, 3 and 4 for ORCA, S3 and the oracle.
_FIGURES = ("output_tokens_per_s", "average_batch", "num_iterations")
_NUMBERS = {
    "GPT-J": ((2061.16, 2349.67, 2569.09), (69.94, 530.0, 564.88), (7988, 1054, 989)),
    "LLAMA 13B": ((1018.15, 1641.55, 1907.09), (31.61, 274.66, 527.04), (17675, 2034, 1060)),
    "GPT-NEOX": ((490.15, 1344.94, 1530.05), (16.89, 157.59, 292.19), (33069, 3545, 1912)),
    "LLAMA 33B": ((91.46, 593.73, 834.30), (4.0, 42.47, 77.35), (139790, 13155, 7223)),
    "GPT3, 6 GPUs": ((), (11.95, 114.22, 209.47), (46734, 4891, 2667)),
    "GPT3, 8 GPUs": ((), (28.68, 247.85, 470.65), (19482, 2254, 1187)),
    "GPT3, 10 GPUs": ((), (48.99, 399.62, 564.88), (11403, 1398, 989)),
}
PAPER = {
    model: {name: own for name, own in zip(_FIGURES, numbers, strict=True) if own}
    for model, numbers in _NUMBERS.items()
}


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
        num_pages = self.cost.kv_tokens // PAGE_TOKENS
        config = self.cost.config(
            num_pages=num_pages,
            num_host_pages=num_pages,
            max_slots=self.max_slots,
            max_context=MAX_CONTEXT,
            max_step_tokens=max(2048, self.max_slots),
        )
        # Without retention: the requests share no prefix.
        policy = replace(PRESETS[self.policy], retention=Stateless())
        predicted = self.predictions
        return simulate(items, policy, config, self.cost, predictions=predicted, label=self.policy)


def imitated(
    items: Sequence[WorkloadItem], accuracy: float, seed: int
) -> list[LengthPrediction | None]:
    """Return predictions that are right at a rate of `accuracy`, and otherwise one bucket off."""
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


POLICIES = ("orca", "vllm_like", "s3", "s3_oracle", "auto")
# Over the rate at which ORCA answers when all requests arrive at once.
RATES = (0.5, 1.0, 2.0, 4.0, 8.0)


def run(options: argparse.Namespace) -> dict[str, Any]:
    items, predictions = _requests(options)
    costs, few, seed = dict(machines()), options.num_slo_requests, options.seed

    def played(policy: str, machine: str, count: int | None = None) -> Run:
        slots = options.max_slots
        return Run(policy, costs[machine], items[:count], predictions[:count], slots)

    offline = {name: {p: played(p, name).at_once() for p in POLICIES} for name in costs}
    slo = {}
    for name in MODELS if few else ():
        rates = [factor * offline[name]["orca"]["requests_per_s"] for factor in RATES]
        slo[name] = {
            policy: [played(policy, name, few).arriving(rate, seed) for rate in rates]
            for policy in POLICIES
        }
    lengths = [item.num_output_tokens for item in items]
    return {
        "mean_prompt_tokens": float(np.mean([len(item.prompt_token_ids) for item in items])),
        "mean_output_tokens": float(np.mean(lengths)),
        "models": offline,
        "paper": PAPER,
        "slo": slo,
    }


def _requests(
    options: argparse.Namespace,
) -> tuple[list[WorkloadItem], list[LengthPrediction | None]]:
    from jaxserve.models.tokenizer import Tokenizer
    from jaxserve.workload import sharegpt

    tokenizer = Tokenizer.of_model(options.model)
    items = sharegpt.sample(
        options.num_requests,
        options.seed,
        tokenizer=tokenizer,
        max_output_tokens=MAX_CONTEXT - 512,
        is_limit_known=False,
        accepts=is_tested_on,
    )
    predictor = load_predictor(options)
    if predictor is not None:
        return items, list(predictions_of(predictor, items, tokenizer) or ())
    return items, imitated(items, options.accuracy, options.seed)


OPTIONS = (
    option("--num-requests", 2000, "that arrive all at once"),
    option("--num-slo-requests", 500, "of these that arrive at a rate; 0 for none"),
    option("--max-slots", 1024, "most sequences at once"),
    option("--predictor", None, "folder of a trained predictor; imitated without it"),
    option("--accuracy", 0.986, "of the imitated predictor: table 5, Alpaca"),
    option("--model", "smollm2-135m", "the model whose tokenizer counts"),
    option("--seed", 0, "of the draw, the arrivals and the imitation"),
)
main = Benchmark(__doc__, run, OPTIONS, "s3")


if __name__ == "__main__":
    sys.exit(main())
