"""The S3 paper's tables 2 and 3 and figures 4d and 5, simulated: `python -m benchmarks.s3 --help`.

The paper's models on its GPU, as rooflines; our scheduler, page pool and supervisor as they serve.
Tables on stderr, one JSON object on stdout. docs/benchmarks.md says what each figure means.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
from rich.table import Table

from benchmarks.output import command, show
from benchmarks.policies import average_batch
from benchmarks.serving import arguments_of, load_predictor, predictions_of
from benchmarks.workloads import is_tested_on
from jaxserve.core.config import EngineConfig
from jaxserve.core.metrics import summarise
from jaxserve.core.prediction import LengthPrediction
from jaxserve.planning import DeviceRoofs, ModelShape, RooflineCost, simulate
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.retention.stateless import Stateless
from jaxserve.workload import WorkloadItem
from jaxserve.workload.arrivals import with_arrivals
from predictor import LengthBuckets

# The longest sequence, which ORCA reserves for each.
MAX_CONTEXT = 2048
PAGE_TOKENS = 16
# NVIDIA A100 80 GB (SXM): data sheet; PCIe 4.0 x8 as in section 4.
A100 = DeviceRoofs(
    flops=312e12, memory_bytes_per_s=2.039e12, link_bytes_per_s=15.75e9, memory_bytes=80e9
)
# Table 1, as printed.
MODELS = {
    "GPT-J": ModelShape(num_params=6e9, num_layers=28, hidden_size=5120),
    "LLAMA 13B": ModelShape(num_params=13e9, num_layers=40, hidden_size=4096),
    "GPT-NEOX": ModelShape(num_params=20e9, num_layers=44, hidden_size=6144),
    "LLAMA 33B": ModelShape(num_params=30e9, num_layers=60, hidden_size=6656),
}
GPT3 = ModelShape(num_params=175e9, num_layers=96, hidden_size=12288)
NUM_GPUS = (6, 8, 10)
POLICIES = ("orca", "s3", "s3_oracle", "auto")
# Tables 2, 3 and 4 of the paper: tokens a second, average batch, iterations; ORCA, S3 and oracle.
PAPER = {
    "GPT-J": {
        "output_tokens_per_s": (2061.16, 2349.67, 2569.09),
        "average_batch": (69.94, 530.0, 564.88),
        "num_iterations": (7988, 1054, 989),
    },
    "LLAMA 13B": {
        "output_tokens_per_s": (1018.15, 1641.55, 1907.09),
        "average_batch": (31.61, 274.66, 527.04),
        "num_iterations": (17675, 2034, 1060),
    },
    "GPT-NEOX": {
        "output_tokens_per_s": (490.15, 1344.94, 1530.05),
        "average_batch": (16.89, 157.59, 292.19),
        "num_iterations": (33069, 3545, 1912),
    },
    "LLAMA 33B": {
        "output_tokens_per_s": (91.46, 593.73, 834.30),
        "average_batch": (4.0, 42.47, 77.35),
        "num_iterations": (139790, 13155, 7223),
    },
    "GPT3, 6 GPUs": {
        "average_batch": (11.95, 114.22, 209.47),
        "num_iterations": (46734, 4891, 2667),
    },
    "GPT3, 8 GPUs": {
        "average_batch": (28.68, 247.85, 470.65),
        "num_iterations": (19482, 2254, 1187),
    },
    "GPT3, 10 GPUs": {
        "average_batch": (48.99, 399.62, 564.88),
        "num_iterations": (11403, 1398, 989),
    },
}
# Section 4.1: seconds a token that an English reader takes.
SLO_S = 0.1875
# Of the rate at which ORCA answers when all requests are there at once.
RATES = (0.5, 1.0, 2.0, 4.0, 8.0)


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the result; the exit code."""
    return command(run, _parser().parse_args(arguments), show_result=_print_tables)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every model under every policy, all requests at once and arriving."""
    from benchmarks import environment

    items, predictions = _requests(options)
    machines = dict(_machines())
    offline = {
        name: {
            policy: _figures(_Run(policy, cost, items, predictions, options.max_slots))
            for policy in POLICIES
        }
        for name, cost in machines.items()
    }
    few = options.num_slo_requests
    slo = {
        name: {
            policy: [
                _served(
                    _Run(policy, machines[name], items[:few], predictions[:few], options.max_slots),
                    factor * offline[name]["orca"]["requests_per_s"],
                    options.seed,
                )
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


@final
@dataclass(frozen=True)
class _Run:
    policy: str
    cost: RooflineCost
    items: Sequence[WorkloadItem]
    predictions: Sequence[LengthPrediction | None]
    max_slots: int

    def stateless(self) -> Policy:
        """Requests have nothing in common, and swaps are those of preempted sequences alone."""
        return replace(PRESETS[self.policy], retention=Stateless())

    def config(self) -> EngineConfig:
        """As many pages as fit beside the weights; the host has room for as many again."""
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


def _machines() -> Iterator[tuple[str, RooflineCost]]:
    for name, model in MODELS.items():
        yield name, RooflineCost(model=model, roofs=A100, page_tokens=PAGE_TOKENS)
    for count in NUM_GPUS:
        yield (
            f"GPT3, {count} GPUs",
            RooflineCost(model=GPT3, roofs=A100, page_tokens=PAGE_TOKENS, num_stages=count),
        )


def _figures(run: _Run) -> dict[str, Any]:
    """Of all requests at once."""
    done = simulate(
        run.items,
        run.stateless(),
        run.config(),
        run.cost,
        predictions=run.predictions,
        label=run.policy,
    )
    stats = done.stats
    pages_s = run.cost.swap_s(stats.num_pages_out + stats.num_pages_in)
    return {
        **summarise(done.completions, done.wall_s),
        "average_batch": average_batch(done.steps),
        "num_iterations": stats.num_iterations,
        "num_preemptions": stats.num_preemptions,
        "num_outgrown": stats.num_outgrown,
        "penalty_share": pages_s / done.wall_s,
    }


def _served(run: _Run, rate: float, seed: int) -> dict[str, float]:
    """Of requests that arrive at this rate: how many were served within their bound."""
    arriving = with_arrivals(run.items, f"poisson:{rate}", seed)
    done = simulate(
        arriving,
        run.stateless(),
        run.config(),
        run.cost,
        predictions=run.predictions,
        label=run.policy,
    )
    within = [
        completion.timing.latency_s <= SLO_S * len(completion.token_ids)
        for completion in done.completions
        if completion.timing.latency_s is not None
    ]
    return {
        "rate": rate,
        "share_within": sum(within) / len(run.items),
        "requests_within_per_s": sum(within) / done.wall_s,
    }


def _requests(
    options: argparse.Namespace,
) -> tuple[list[WorkloadItem], list[LengthPrediction | None]]:
    """ShareGPT's prompts and lengths, and what is predicted of them."""
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
    return items, _imitated(items, options.accuracy, options.seed)


def _imitated(
    items: Sequence[WorkloadItem], accuracy: float, seed: int
) -> list[LengthPrediction | None]:
    """A predictor that is right so often, and one bucket off otherwise, as the paper's."""
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


def _print_tables(result: dict[str, Any]) -> None:
    table = Table(
        "model", "policy", "tokens/s", "paper", "batch", "paper", "iterations", "paper",
        "of ORCA", "paper", "preempted", box=None, header_style="bold",
    )  # fmt: skip
    for name, runs in result["models"].items():
        for policy, figures in runs.items():
            paper = {key: _paper(name, key, policy) for key in PAPER["GPT-J"]}
            ratio = figures["output_tokens_per_s"] / runs["orca"]["output_tokens_per_s"]
            first = _paper(name, "output_tokens_per_s", "orca")
            theirs = paper["output_tokens_per_s"]
            table.add_row(
                name if policy == "orca" else "",
                policy,
                f"{figures['output_tokens_per_s']:.0f}",
                _shown(theirs),
                f"{figures['average_batch']:.1f}",
                _shown(paper["average_batch"]),
                str(figures["num_iterations"]),
                _shown(paper["num_iterations"]),
                f"{ratio:.2f}",
                f"{theirs / first:.2f}" if theirs and first else "",
                str(figures["num_preemptions"]),
            )
    show(table)


def _paper(model: str, key: str, policy: str) -> float | None:
    theirs = PAPER.get(model, {}).get(key)
    known = ("orca", "s3", "s3_oracle")
    return None if theirs is None or policy not in known else theirs[known.index(policy)]


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.s3",
        description="The S3 paper's models on its GPU, simulated with rooflines: tables 2, 3 and 4 "
        "with ShareGPT's lengths, and sequences served within 0.1875 s a token.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--num-requests", type=int, default=2000, help="all there at once")
    add("--num-slo-requests", type=int, default=500, help="of these that arrive; 0 for none")
    add("--max-slots", type=int, default=1024, help="most sequences at once")
    add("--predictor", default=None, help="folder of a trained one; by default one is imitated")
    add("--accuracy", type=float, default=0.986, help="of the imitated one: table 5, Alpaca")
    add("--model", default="smollm2-135m", help="whose tokenizer counts")
    add("--seed", type=int, default=0, help="of the draw, the arrivals and the imitation")
    add("--output", type=Path, default=None, help="also write the object here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
