"""The S3 paper's tables 2 to 4 and figures 4d and 5, simulated: `python -m benchmarks.s3 --help`.

The paper's models on its GPU, as rooflines, under the scheduler, page pool and supervisor that
serve on a device. A table on stderr, one JSON object on stdout; docs/benchmarks/papers.md says what
each figure means.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.common.output import arguments_of, command, show
from benchmarks.common.predictors import load_predictor, predictions_of
from benchmarks.common.workloads import is_tested_on
from benchmarks.s3.playing import Run, imitated
from benchmarks.s3.setup import MAX_CONTEXT, MODELS, PAPER, machines, paper_value
from jaxserve.core.prediction import LengthPrediction
from jaxserve.workload import WorkloadItem

POLICIES = ("orca", "vllm_like", "s3", "s3_oracle", "auto")
# Over the rate at which ORCA answers when all requests arrive at once.
RATES = (0.5, 1.0, 2.0, 4.0, 8.0)


def main(arguments: list[str] | None = None) -> int:
    """Run, print and write the result; return the exit code."""
    return command(run, build_parser().parse_args(arguments), show_result=_print_tables)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return every model's figures under every policy, all requests at once and arriving."""
    from benchmarks.common import environment

    items, predictions = _requests(options)
    costs = dict(machines())
    offline = {
        name: {
            policy: Run(policy, cost, items, predictions, options.max_slots).at_once()
            for policy in POLICIES
        }
        for name, cost in costs.items()
    }
    few = options.num_slo_requests
    slo = {
        name: {
            policy: [
                Run(
                    policy, costs[name], items[:few], predictions[:few], options.max_slots
                ).arriving(factor * offline[name]["orca"]["requests_per_s"], options.seed)
                for factor in RATES
            ]
            for policy in POLICIES
        }
        for name in (MODELS if few else ())
    }
    lengths = [item.num_output_tokens for item in items]
    return {
        "benchmark": "s3",
        "arguments": arguments_of(options),
        "mean_prompt_tokens": float(np.mean([len(item.prompt_token_ids) for item in items])),
        "mean_output_tokens": float(np.mean(lengths)),
        "models": offline,
        "paper": PAPER,
        "slo": slo,
        **environment.describe(),
    }


def _requests(
    options: argparse.Namespace,
) -> tuple[list[WorkloadItem], list[LengthPrediction | None]]:
    """Return prompts and lengths of ShareGPT, and the predictions of them."""
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


def _print_tables(result: dict[str, Any]) -> None:
    table = Table(
        "model", "policy", "tokens/s", "paper", "batch", "paper", "iterations", "paper",
        "of ORCA", "paper", "preempted", box=None, header_style="bold",
    )  # fmt: skip
    for name, runs in result["models"].items():
        for policy, figures in runs.items():
            rate, batch, iterations = (
                paper_value(name, key, policy)
                for key in ("output_tokens_per_s", "average_batch", "num_iterations")
            )
            ratio = figures["output_tokens_per_s"] / runs["orca"]["output_tokens_per_s"]
            orca = paper_value(name, "output_tokens_per_s", "orca")
            table.add_row(
                name if policy == "orca" else "",
                policy,
                f"{figures['output_tokens_per_s']:.0f}",
                _shown(rate),
                f"{figures['average_batch']:.1f}",
                _shown(batch),
                str(figures["num_iterations"]),
                _shown(iterations),
                f"{ratio:.2f}",
                f"{rate / orca:.2f}" if rate and orca else "",
                str(figures["num_preemptions"]),
            )
    show(table)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.s3",
        description="The S3 paper's models on its GPU, simulated with rooflines: tables 2, 3 and 4 "
        "with ShareGPT's lengths, and sequences served within 0.1875 s a token.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--num-requests", type=int, default=2000, help="that arrive all at once")
    add(
        "--num-slo-requests",
        type=int,
        default=500,
        help="of these that arrive at a rate; 0 for none",
    )
    add("--max-slots", type=int, default=1024, help="most sequences at once")
    add("--predictor", default=None, help="folder of a trained predictor; imitated without it")
    add("--accuracy", type=float, default=0.986, help="of the imitated predictor: table 5, Alpaca")
    add("--model", default="smollm2-135m", help="the model whose tokenizer counts")
    add("--seed", type=int, default=0, help="of the draw, the arrivals and the imitation")
    add("--output", type=Path, default=None, help="also write the object here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
