"""ExeGPT's figures 6 and 8 and table 6, estimated: `python -m benchmarks.exegpt --help`.

The paper's models on its clusters, as rooflines: the schedule that `jaxserve.planning.schedules`
finds under each of four latency bounds, beside static batches. A table on stderr, one JSON object
on stdout; docs/benchmarks/papers.md says what each figure means.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from tqdm import tqdm

from benchmarks.common.output import arguments_of, command, show
from benchmarks.exegpt.scenarios import PAPER_MEAN_GAINS, PAPER_TABLE_6, Scenario, scenarios
from benchmarks.exegpt.static_batching import StaticBatches
from jaxserve.core.errors import InfeasibleBoundError, InvalidConfigError
from jaxserve.planning.schedules import (
    MODELS,
    LatencyBounds,
    Layout,
    Points,
    Policy,
    RRATimeline,
    WAATimeline,
    search,
    timelines_of,
)
from jaxserve.planning.schedules.misses import misses_of


def main(arguments: list[str] | None = None) -> int:
    """Run, print and write the result; return the exit code."""
    return command(run, build_parser().parse_args(arguments), show_result=_print_tables)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return every scenario's schedules, their gains, and what Algorithm 1 alone would miss."""
    from benchmarks.common import environment

    models = tuple(options.models.split(","))
    unknown = [model for model in models if model not in MODELS]
    if unknown:
        raise InvalidConfigError(
            f"--models {options.models!r}: {', '.join(unknown)} is unknown; pass some of "
            f"{','.join(MODELS)}"
        )
    points, cases = [], []
    for scenario in tqdm(list(scenarios(models)), desc="exegpt", leave=False, delay=2):
        static = StaticBatches.of(scenario.deployment(), scenario.lengths())
        timelines = timelines_of(scenario.deployment(), scenario.lengths())
        for bound_s in static.bounds():
            points.append(_point(scenario, static, bound_s))
            cases.append((timelines, LatencyBounds(latency_s=bound_s)))
    misses = misses_of(cases)
    return {
        "benchmark": "exegpt",
        "arguments": arguments_of(options),
        "points": points,
        "mean_gain": {
            name: _mean_gain([p for p in points if name == "all" or p["figure"] == number])
            for name, number in (("small", 6), ("large", 8), ("all", 0))
        },
        "paper_mean_gain": PAPER_MEAN_GAINS,
        "table_6": _table_6(),
        "algorithm_1": {
            "num_cases": misses.num_cases,
            "missed_share": misses.missed_share,
            "num_not_found": misses.num_not_found,
            "worst_share": misses.worst_share,
            "num_evaluated": misses.num_evaluated,
            "num_evaluated_by_bounds": misses.num_evaluated_by_bounds,
        },
        **environment.describe(),
    }


def _point(scenario: Scenario, static: StaticBatches, bound_s: float) -> dict[str, Any]:
    """Return the best schedule of a scenario under a bound, beside static batches."""
    named = {
        "figure": 8 if scenario.is_large else 6,
        "model": scenario.model,
        "cluster": scenario.cluster,
        "num_devices": scenario.num_devices,
        "task": scenario.task,
        "bound_s": None if math.isinf(bound_s) else bound_s,
        "static_per_s": static.best(bound_s),
    }
    try:
        choice = search(scenario.deployment(), scenario.lengths(), LatencyBounds(latency_s=bound_s))
    except InfeasibleBoundError as error:
        return named | {"per_s": 0.0, "gain": 0.0, "lowest_s": error.lowest["latency_s"]}
    schedule, estimates = choice.schedule, choice.estimates
    return named | {
        "per_s": float(estimates.throughput),
        "gain": float(estimates.throughput) / named["static_per_s"],
        "latency_s": float(estimates.latency_s),
        "policy": schedule.layout.policy.value,
        "degree": schedule.layout.degree,
        "num_sharded_devices": schedule.layout.num_sharded_devices,
        "encode_batch": schedule.encode_batch,
        "num_decodes": schedule.num_decodes,
        "num_micro_batches": schedule.num_micro_batches,
        "num_encode_devices": schedule.num_encode_devices,
        "decode_batch": schedule.decode_batch,
        "memory_gb": float(estimates.memory_bytes) / 1e9,
        "search_s": choice.elapsed_s,
        "evaluated_share": choice.num_evaluated / choice.num_points,
    }


def _mean_gain(points: list[dict[str, Any]]) -> float | None:
    gains = [point["gain"] for point in points]
    return float(np.mean(gains)) if gains else None


def _table_6() -> list[dict[str, Any]]:
    """Return the paper's four schedules of OPT 13B and task S, as estimated here."""
    scenario = Scenario("OPT-13B", "A40", 4, "S")
    deployment, lengths = scenario.deployment(), scenario.lengths()
    rra, waa = RRATimeline(deployment, lengths), WAATimeline(deployment, lengths)
    rows = []
    for bound_s, policy, batch, num_decodes, degree, latency_s, per_s in PAPER_TABLE_6:
        timeline, kind = (rra, Policy.RRA) if policy == "rra" else (waa, Policy.WAA_C)
        layout = Layout(policy=kind, degree=degree, num_sharded_devices=4)
        point = Points.one(timeline.layouts.index(layout), batch, num_decodes)
        estimates = timeline.estimate(point)[0]
        rows.append(
            {
                "bound_s": None if math.isinf(bound_s) else bound_s,
                "policy": policy,
                "encode_batch": batch,
                "num_decodes": num_decodes,
                "degree": degree,
                "paper_latency_s": latency_s,
                "latency_s": float(estimates.latency_s),
                "paper_per_s": per_s,
                "per_s": float(estimates.throughput),
            }
        )
    return rows


def _print_tables(result: dict[str, Any]) -> None:
    table = Table(
        "model", "task", "bound s", "static /s", "ours /s", "gain", "latency s", "policy", "degree",
        "B_E", "N_D", "B_m", "B_D", "search s", box=None, header_style="bold",
    )  # fmt: skip
    for point in result["points"]:
        name = f"{point['model']} {point['num_devices']}x{point['cluster']}"
        bound = "inf" if point["bound_s"] is None else f"{point['bound_s']:.1f}"
        cells = [name, point["task"], bound, f"{point['static_per_s']:.2f}"]
        if "policy" not in point:
            table.add_row(*cells, "none", "", f"{point['lowest_s']:.1f}")
            continue
        table.add_row(
            *cells,
            f"{point['per_s']:.2f}",
            f"{point['gain']:.2f}",
            f"{point['latency_s']:.1f}",
            point["policy"],
            f"{point['degree']} on {point['num_sharded_devices']}",
            str(point["encode_batch"]),
            str(point["num_decodes"]),
            str(point["num_micro_batches"]),
            f"{point['decode_batch']:.0f}",
            f"{point['search_s']:.2f}",
        )
    show(table)
    means = Table("mean gain", "paper", "ours", box=None, header_style="bold")
    for name, paper in result["paper_mean_gain"].items():
        ours = result["mean_gain"][name]
        means.add_row(name, f"{paper:.1f}", "" if ours is None else f"{ours:.2f}")
    show(means)
    fits = Table(
        "table 6", "B_E", "N_D", "degree", "latency s", "paper", "answers/s", "paper",
        box=None, header_style="bold",
    )  # fmt: skip
    for row in result["table_6"]:
        fits.add_row(
            *(str(row[name]) for name in ("policy", "encode_batch", "num_decodes", "degree")),
            f"{row['latency_s']:.2f}",
            f"{row['paper_latency_s']:.2f}",
            f"{row['per_s']:.2f}",
            f"{row['paper_per_s']:.2f}",
        )
    show(fits)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exegpt",
        description="The best schedules of ExeGPT's models, clusters and tasks under four latency "
        "bounds, estimated from rooflines, beside static batches and the paper's own figures.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--models", default=",".join(MODELS), help="of table 1, separated by commas")
    add("--output", type=Path, default=None, help="also write the object here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
