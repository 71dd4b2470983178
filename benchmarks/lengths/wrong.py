"""What wrong predictions of lengths cost, simulated: `python -m benchmarks.lengths.wrong --help`.

`auto` serves the same requests, all at once, with predictions of each kind and without any, beside
`vllm_like`, and `s3` with the same predictions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.common.harness import Benchmark, numbers, option, some_of
from benchmarks.common.repeats import Figures, repeats, summary
from benchmarks.common.s3_machines import Run, imitated, machines
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.prediction import LengthPrediction
from jaxserve.predictor import LengthBuckets
from jaxserve.workload import WorkloadItem

# What a predictor that is wrong says of its likeliest bucket.
_CONFIDENCE = 0.9
# Share of the requests after which lengths drift, and by how much.
_DRIFT_AT, _DRIFTS = 0.5, {"three times": 3.0, "a third": 1 / 3}


def _chat(rng: np.random.Generator, num: int) -> np.ndarray:
    return rng.lognormal(np.log(300) - 0.5, 1.0, num)


def _two_kinds(rng: np.random.Generator, num: int) -> np.ndarray:
    short, long = rng.lognormal(np.log(40), 0.6, num), rng.lognormal(np.log(700), 0.3, num)
    return np.where(rng.random(num) < 0.75, short, long)


def _short(rng: np.random.Generator, num: int) -> np.ndarray:
    return rng.lognormal(np.log(65) - 0.4, 0.9, num)


LENGTHS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "chat": _chat,
    "two_kinds": _two_kinds,
    "short": _short,
}


def drawn(lengths: str, num: int, seed: int, context: int) -> list[WorkloadItem]:
    """Return requests whose lengths are scaled to a context from one of 2,048 tokens."""
    rng, scale = np.random.default_rng(seed), context / 2048
    answers = np.clip(np.ceil(scale * LENGTHS[lengths](rng, num)), 1, context * 3 // 4)
    prompts = np.clip(np.ceil(scale * rng.lognormal(np.log(77) - 0.5, 1.0, num)), 1, context // 4)
    return [
        WorkloadItem(prompt_token_ids=(1,) * int(prompt), num_output_tokens=int(answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def wrong(kind: str, items: Sequence[WorkloadItem], context: int, seed: int) -> list[Any]:
    """Return sure predictions that are `random`, `reversed`, or always the `shortest` or `longest`.

    Random ones have the right shares of each length; reversed ones call the longest answer the
    shortest.
    """
    buckets = LengthBuckets.equal_width(context)
    lengths = np.asarray([item.num_output_tokens for item in items])
    places = buckets.bucket_of(lengths)
    in_order = np.argsort(np.argsort(lengths, kind="stable"))
    said = {
        "random": np.random.default_rng(seed + 1).permutation(places),
        "reversed": np.sort(places)[::-1][in_order],
        "shortest": np.zeros_like(places),
        "longest": np.full_like(places, buckets.num - 1),
    }[kind]
    rows = np.full((len(items), buckets.num), (1 - _CONFIDENCE) / (buckets.num - 1))
    rows[np.arange(len(items)), said] = _CONFIDENCE
    return [LengthPrediction(buckets, row) for row in rows]


WRONG = ("random", "reversed", "shortest", "longest")


def drifted(items: Sequence[WorkloadItem], factor: float, context: int) -> list[WorkloadItem]:
    """Return the items, of which those from the middle on have other lengths."""
    half = int(_DRIFT_AT * len(items))
    return [
        *items[:half],
        *(
            replace(
                item,
                num_output_tokens=min(
                    max(1, round(factor * item.num_output_tokens)), context * 3 // 4
                ),
            )
            for item in items[half:]
        ),
    ]


def cases(
    items: Sequence[WorkloadItem], accuracies: Sequence[float], context: int, seed: int
) -> dict[str, tuple[Sequence[WorkloadItem], Sequence[LengthPrediction | None]]]:
    """Return requests and what is predicted of them, by the kind of predictions."""
    found: dict[str, Any] = {
        f"right for {share:.0%}": (items, imitated(items, share, seed, context))
        for share in accuracies
    }
    found |= {kind: (items, wrong(kind, items, context, seed)) for kind in WRONG}
    found |= {
        f"right until lengths become {name}": (
            drifted(items, factor, context),
            imitated(items, 0.95, seed, context),
        )
        for name, factor in _DRIFTS.items()
    }
    return found


def run(options: argparse.Namespace) -> dict[str, Any]:
    accuracies = numbers(options.accuracies, "--accuracies")
    names = some_of(options.lengths, "--lengths", LENGTHS)
    costs = dict(machines())
    if options.model not in costs:
        raise InvalidConfigError(f"--model {options.model!r}: pass one of {', '.join(costs)}")

    def played(policy: str, requests: Sequence[WorkloadItem], predicted: Sequence[Any]) -> Figures:
        run = Run(policy, costs[options.model], requests, predicted, 1024, options.context, True)
        found = run.at_once()
        kept = ("output_tokens_per_s", "average_batch", "num_preemptions")
        latency_s = found["latency_s"]
        times_s = {f"{name}_s": latency_s[name] for name in ("p50", "p99")}
        return {**{name: found[name] for name in kept}, **times_s}

    runs: dict[str, dict[str, list[Figures]]] = {name: {} for name in names}
    work = [(name, seed) for name in names for seed in range(options.repeats)]
    for name, seed in tqdm(work, unit="set", leave=False, delay=2):
        items = drawn(name, options.num_requests, seed, options.context)
        bases: dict[tuple[WorkloadItem, ...], dict[str, Figures]] = {}
        for kind, (requests, predicted) in cases(items, accuracies, options.context, seed).items():
            unpredicted = [None] * len(requests)
            others = bases.get(tuple(requests)) or {
                policy: played(policy, requests, unpredicted) for policy in ("auto", "vllm_like")
            }
            bases[tuple(requests)] = others
            own = played("auto", requests, predicted)
            s3 = played("s3", requests, predicted)
            titles = {
                "over_none": others["auto"],
                "over_vllm_like": others["vllm_like"],
                "over_s3": s3,
            }
            for title, other in titles.items():
                figures = ("output_tokens_per_s", "p50_s", "p99_s")
                own[title] = {figure: own[figure] / other[figure] for figure in figures}
            runs[name].setdefault(kind, []).append(own)
    return {
        "lengths": {
            name: {kind: summary(own) for kind, own in found.items()}
            for name, found in runs.items()
        }
    }


OPTIONS = (
    option("--lengths", "chat,two_kinds", f"of {', '.join(LENGTHS)}, separated by commas"),
    option(
        "--accuracies", "1,0.9,0.8,0.66,0.5,0.3", "shares of right buckets; else one bucket off"
    ),
    option("--num-requests", 300, "that arrive all at once"),
    option("--context", 512, "tokens; lengths and memory are those of 2,048 tokens, scaled"),
    option("--model", "LLAMA 33B", "of the S3 paper's table 1, on its GPU"),
    repeats("kind"),
)
main = Benchmark(__doc__, run, OPTIONS, "wrong_lengths")


if __name__ == "__main__":
    sys.exit(main())
