"""The S3 paper's tables 2 to 4 and figures 4d and 5, simulated: `python -m benchmarks.s3 --help`.

The paper's models on its GPU, as rooflines, under the scheduler, page pool and supervisor that
serve on a device.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

from benchmarks.common.harness import Benchmark, option
from benchmarks.common.policies import load_predictor, predictions_of
from benchmarks.common.s3_machines import MAX_CONTEXT, MODELS, Run, imitated, machines
from benchmarks.common.workloads import is_tested_on
from jaxserve.core.prediction import LengthPrediction
from jaxserve.workload import WorkloadItem

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
