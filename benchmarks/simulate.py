"""How well simulated runs predict real ones: `python -m benchmarks.simulate --help`.

Measures step times, plays the workload against every policy on the device as benchmarks.policies
does, and again on the simulated executor. A table on stderr, one JSON object on stdout.
docs/benchmarks.md says what each figure means.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks import policies
from benchmarks.output import emit, run_or_explain, show
from benchmarks.serving import arguments_of, parse_policies
from jaxserve.core.metrics import summarise

if TYPE_CHECKING:
    from jaxserve.planning import StepTimes

FIGURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "output_tokens_per_s": lambda figures: figures["output_tokens_per_s"],
    "latency_p50_s": lambda figures: figures["latency_s"]["p50"],
    "latency_p99_s": lambda figures: figures["latency_s"]["p99"],
    "first_token_p50_s": lambda figures: figures["time_to_first_token_s"]["p50"],
}
# Those that the worst error is taken over.
JUDGED = ("output_tokens_per_s", "latency_p99_s")


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the result; the exit code."""
    options = _parser().parse_args(arguments)
    result = run_or_explain(run, options)
    if result is None:
        return 2
    _print_table(result)
    emit(result, options.output)
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measured and predicted figures of every policy, and the errors of the predictions."""
    from benchmarks import environment
    from benchmarks.replay import replay
    from jaxserve import Runtime
    from jaxserve.planning import StepTimes, simulate

    chosen = parse_policies(options.policies)
    runs: dict[str, list[dict[str, Any]]] = {policy.name: [] for policy in chosen}
    tables: list[StepTimes] = []
    items, config = [], None
    for repeat in range(options.repeats):
        for policy in chosen:
            with Runtime.from_pretrained(
                options.model,
                policy=policy,
                max_slots=options.max_slots,
                max_context=options.max_context,
                kv_memory=options.kv_memory,
            ) as rt:
                items, config = policies.arriving_items(options, rt), rt.config
                if options.step_times is None:
                    tables.append(rt.measure_step_times(rounds=1))
                elif not tables:
                    tables.append(rt.load_step_times(options.step_times))
                done, wall_s = replay(rt, items, label=f"{policy.name}, run {repeat + 1}")
                figures = summarise(done, wall_s)
                runs[policy.name].append({**figures, "num_steps": rt.stats().num_steps})
    assert config is not None
    times = StepTimes.median(tables)
    if options.save_step_times is not None:
        times.save(options.save_step_times)
    compared = {}
    for policy in chosen:
        begin_s = time.perf_counter()
        simulation = simulate(items, policy, config, times)
        took_s = time.perf_counter() - begin_s
        predicted = summarise(simulation.completions, simulation.wall_s)
        measured = policies.middle(runs[policy.name])
        compared[policy.name] = {
            **_compare(measured, predicted),
            "num_steps": {
                "measured": measured["num_steps"],
                "predicted": simulation.stats.num_steps,
            },
            "output_tokens_per_s_of_every_run": measured["output_tokens_per_s_of_every_run"],
            "simulated_steps_per_s": simulation.stats.num_steps / took_s,
        }
    return {
        "benchmark": "simulate",
        "arguments": arguments_of(options),
        "policies": compared,
        "worst_error": max(abs(c[name]["error"]) for c in compared.values() for name in JUDGED),
        "machine_slowness": [_slowness(table, times) for table in tables],
        "step_times": {k: v for k, v in asdict(times).items() if k != "origin"},
        **environment.describe(),
    }


def _compare(measured: dict[str, Any], predicted: dict[str, Any]) -> dict[str, Any]:
    compared = {}
    for name, figure in FIGURES.items():
        real, simulated = figure(measured), figure(predicted)
        compared[name] = {
            "measured": real,
            "predicted": simulated,
            "error": simulated / real - 1,
        }
    return compared


def _slowness(table: StepTimes, median: StepTimes) -> float:
    """How much longer than the median table's the decode iterations of one table take."""
    ratios = [
        seconds / median.decode_s[size](positions)
        for size, curve in table.decode_s.items()
        for positions, seconds in curve.points
    ]
    return statistics.median(ratios)


def _print_table(result: dict[str, Any]) -> None:
    print("measured, predicted and the prediction's error:", file=sys.stderr)
    names = [name.removesuffix("_s").replace("_", " ") for name in FIGURES]
    table = Table("policy", *names, box=None, header_style="bold")
    for policy, compared in result["policies"].items():
        cells = (compared[name] for name in FIGURES)
        table.add_row(
            policy,
            *(f"{c['measured']:7.4g} {c['predicted']:7.4g} {c['error']:+6.1%}" for c in cells),
        )
    show(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate",
        description="Measured step times, real runs and simulated ones: a table and one JSON "
        "object with the errors of the predictions.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    policies.add_arguments(parser)
    add = parser.add_argument_group("step times").add_argument
    add("--step-times", type=Path, default=None, help="use these, measured here before")
    add("--save-step-times", type=Path, default=None, help="write the measured ones here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
