"""Policies compared on one workload: `python -m benchmarks.policies --help`.

A table on stderr, one JSON object on stdout. Every policy serves the same requests on the same
engine; runs are interleaved, and their quiet moments count. docs/benchmarks.md says what each
figure means.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks import workloads
from benchmarks.output import command, show
from benchmarks.quiet import Recording, in_quiet
from benchmarks.serving import (
    DEFAULT,
    add_policy_options,
    arguments_of,
    load_predictor,
    parse_policies,
)
from jaxserve.core.metrics import summarise
from jaxserve.workload import WorkloadItem
from jaxserve.workload.arrivals import with_arrivals

if TYPE_CHECKING:
    from jaxserve.engine.recorder import StepRecord
    from jaxserve.runtime import Runtime

ARRIVALS = "all, constant:SECONDS or poisson:RATE; all by default, or as they were recorded"


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the result; the exit code."""
    return command(run, _parser().parse_args(arguments), show_result=_print_table)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every policy's figures on the same requests."""
    from benchmarks import environment
    from benchmarks.replay import replay
    from jaxserve import Runtime

    policies = parse_policies(options.policies)
    predictor = load_predictor(options)
    runs: dict[str, list[dict[str, Any]]] = {policy.name: [] for policy in policies}
    recordings: dict[str, list[Recording]] = {policy.name: [] for policy in policies}
    for repeat in range(options.repeats):
        for policy in policies:
            with Runtime.from_pretrained(
                options.model,
                policy=policy,
                max_slots=options.max_slots,
                max_context=options.max_context,
                kv_memory=options.kv_memory,
                predictor=predictor,
            ) as rt:
                items = arriving_items(options, rt)
                done, wall_s = replay(rt, items, label=f"{policy.name}, run {repeat + 1}")
                runs[policy.name].append(
                    {
                        **summarise(done, wall_s),
                        "average_batch": average_batch(rt.report().steps),
                        "engine": asdict(rt.stats()),
                    }
                )
                recordings[policy.name].append(Recording.of(rt, done))
    return {
        "benchmark": "policies",
        "arguments": arguments_of(options),
        "policies": {
            name: _with_split(
                in_quiet(middle(results), recordings[name], _others(recordings, name))
            )
            for name, results in runs.items()
        },
        **environment.describe(),
    }


def arriving_items(options: argparse.Namespace, rt: Runtime) -> list[WorkloadItem]:
    """The workload with its arrivals, the same for every policy."""
    items = workloads.items(options, rt)
    if options.arrivals is None:
        return items
    return with_arrivals(items, options.arrivals, options.seed)


def average_batch(steps: Sequence[StepRecord]) -> float:
    """Sequences that an iteration advances."""
    num_iterations = sum(step.num_iterations for step in steps)
    return sum(step.num_rows * step.num_iterations for step in steps) / max(1, num_iterations)


def _others(recordings: dict[str, list[Recording]], name: str) -> list[Recording]:
    """Runs of other policies."""
    return [each for other, runs in recordings.items() if other != name for each in runs]


def _with_split(figures: dict[str, Any]) -> dict[str, Any]:
    """As figure 6 of the S3 paper: seconds of generation, of preemptions, and of deciding.

    Deciding mostly goes on while the device computes, so it is part of nobody's latency.
    """
    engine = figures["engine"]
    split = {
        "generation": figures["wall_s"] - engine["penalty_s"],
        "penalty": engine["penalty_s"],
        "overhead": engine["planning_s"] + engine["predicting_s"],
    }
    return {**figures, "latency_split_s": split}


def middle(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The run of median throughput, and every run's throughput."""
    rates = [result["output_tokens_per_s"] for result in results]
    median = results[rates.index(statistics.median_low(rates))]
    return {**median, "output_tokens_per_s_of_every_run": rates}


def _print_table(result: dict[str, Any]) -> None:
    table = Table(
        "policy", "tokens/s", "latency p50 s", "p99 s", "first token p50 s", "s/token p50",
        "batch", "iterations", "padding", "preempted", "penalty + overhead", box=None,
        header_style="bold",
    )  # fmt: skip
    for name, figures in result["policies"].items():
        engine, split = figures["engine"], figures["latency_split_s"]
        first, rate = figures["time_to_first_token_s"], figures["time_per_output_token_s"]
        table.add_row(
            name,
            f"{figures['output_tokens_per_s']:.0f}",
            f"{figures['latency_s']['p50']:.1f}",
            f"{figures['latency_s']['p99']:.1f}",
            f"{first['p50']:.2f}",
            f"{rate['p50']:.3f}" if rate else "",
            f"{figures['average_batch']:.1f}",
            str(engine["num_iterations"]),
            str(engine["num_padding_tokens"]),
            str(engine["num_preemptions"]),
            f"{(split['penalty'] + split['overhead']) / split['generation']:.1%}",
        )
    show(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policies",
        description="Policies compared on one workload; prints a table and one JSON object.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_arguments(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is asked and when, of which policies and memory, and how often."""
    add = parser.add_argument
    workloads.add_arguments(parser)
    add("--arrivals", default=None, help=ARRIVALS)
    add("--repeats", type=int, default=1, help="interleaved runs of every policy")
    add_policy_options(parser, policies=DEFAULT, max_context=1024)


if __name__ == "__main__":
    sys.exit(main())
