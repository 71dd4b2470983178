"""ExeGPT's figures 6, 7, 8, 10 and 11 and tables 5 and 6: `python -m benchmarks.exegpt --help`.

The paper's models on its clusters, as rooflines: the schedule that `jaxserve.planning.schedules`
finds under each of four latency bounds, beside the systems that the paper compares with; and the
chosen schedules played by the real scheduler. Tables on stderr, one JSON object on stdout;
docs/benchmarks/papers.md says what each figure means.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from tqdm import tqdm

from benchmarks.common.output import arguments_of, command, show
from benchmarks.exegpt.changed_lengths import figure_11
from benchmarks.exegpt.discrete_baselines import compared
from benchmarks.exegpt.monotony import table_5
from benchmarks.exegpt.points import BASELINES, FAMILIES, Contest
from benchmarks.exegpt.real_world import figure_10
from benchmarks.exegpt.scenarios import (
    PAPER_MEAN_GAINS,
    PAPER_TABLE_6,
    Scenario,
    figure_7,
    scenarios,
)
from jaxserve.core.errors import InvalidConfigError
from jaxserve.planning.schedules import (
    MODELS,
    LatencyBounds,
    Layout,
    Points,
    Policy,
    RRATimeline,
    TaskLengths,
    WAATimeline,
)
from jaxserve.planning.schedules.misses import misses_of

# Quantile of the lengths for which a bound is planned, and the baselines are held to it. Of a
# hundred answers that keep a bound one may miss it: half because it is longer, the other half
# because draws and phases are not all as expected.
_PLANNED_LEVEL = 0.995


def main(arguments: list[str] | None = None) -> int:
    """Run, print and write the result; return the exit code."""
    return command(run, build_parser().parse_args(arguments), show_result=_print_tables)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return every figure and table, the gains, and what Algorithm 1 alone would miss."""
    from benchmarks.common import environment

    models = tuple(options.models.split(","))
    unknown = [model for model in models if model not in MODELS]
    if unknown:
        raise InvalidConfigError(
            f"--models {options.models!r}: {', '.join(unknown)} is unknown; pass some of "
            f"{','.join(MODELS)}"
        )
    points, sevenths, cases = [], [], []
    wanted = [*scenarios(models), *figure_7(models)]
    for scenario in tqdm(dict.fromkeys(wanted), desc="exegpt", leave=False, delay=2):
        lengths = replace(scenario.lengths(), level=_PLANNED_LEVEL)
        contest = Contest(scenario.deployment(), lengths)
        for bound_s in contest.static.bounds():
            point = scenario.named() | contest.point(bound_s, num_seeds=options.seeds)
            if scenario.figure:
                points.append(point)
                cases.append((contest.timelines, LatencyBounds(latency_s=bound_s)))
            if scenario.is_of_figure_7:
                checked = _checked(scenario, lengths, contest, bound_s) if options.seeds else {}
                sevenths.append(point | {"checked": checked})
    return {
        "benchmark": "exegpt",
        "arguments": arguments_of(options),
        "points": points,
        "figure_7": sevenths,
        "figure_10": figure_10(),
        "figure_11": figure_11(),
        "table_5": table_5(),
        "table_6": _table_6(),
        "mean_gain": _mean_gains(points, "per_s"),
        "mean_gain_exegpt": _mean_gains(points, "exegpt_per_s"),
        "mean_gain_overlapping": _mean_gain(points, "exegpt_per_s", or_rra="overlapping_rra_per_s"),
        "paper_mean_gain": PAPER_MEAN_GAINS,
        "mean_gain_over": {name: _mean_gain(points, "per_s", over=name) for name in BASELINES},
        "mean_gain_exegpt_over": {
            name: _mean_gain(points, "exegpt_per_s", over=name) for name in BASELINES
        },
        "played": _played([*points, *(point for point in sevenths if not point["figure"])]),
        "search": {
            "most_s": max((p["search_s"] for p in points if "search_s" in p), default=0.0),
            "most_evaluated_share": {
                model: max(p["evaluated_share"] for p in points if p["model"] == model)
                for model in models
            },
        },
        "algorithm_1": _algorithm_1(cases),
        **environment.describe(),
    }


def _checked(
    scenario: Scenario, lengths: TaskLengths, contest: Contest, bound_s: float
) -> dict[str, Any]:
    """Return what ORCA's and vLLM's best batches did when they were played."""
    parts = scenario.deployment(), lengths
    return {
        name: compared(name, contest.served[name], bound_s, *parts) for name in ("orca", "vllm")
    }


def _mean_gains(points: list[dict[str, Any]], of: str) -> dict[str, float | None]:
    """Return the mean gains of the scenarios of figures 6 and 8, and of both."""
    return {
        name: _mean_gain([p for p in points if name == "all" or p["figure"] == number], of)
        for name, number in (("small", 6), ("large", 8), ("all", 0))
    }


def _mean_gain(
    points: list[dict[str, Any]],
    of: str,
    *,
    over: str = "fastertransformer",
    or_rra: str | None = None,
) -> float | None:
    """Return the mean throughput over that of a baseline, where both keep the bound.

    Args:
      of: the name of a throughput of points.
      or_rra: the name of another throughput of RRA, which counts where it is the best.
    """
    gains = [
        max(point[of], (point[or_rra] or 0.0) if or_rra else 0.0) / point["per_s_of"][over]
        for point in points
        if point[of] and point["per_s_of"][over]
    ]
    return float(np.mean(gains)) if gains else None


def _played(points: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the shares of answers that kept their bounds, over all played schedules."""
    runs = [run for point in points for run in point.get("played", ())]
    if not runs:
        return None
    shares = [run["within"] for run in runs]
    weights = np.array([run["num_answers"] for run in runs], np.float64)
    longer = np.array([run["longer_share"] for run in runs])
    missed = np.array([run["missed_by_others"] for run in runs])
    errors = [run["per_s"] / run["expected_per_s"] - 1 for run in runs]
    policies = [run["policy"] for run in runs]
    return {
        "num_runs": len(runs),
        "num_runs_of": {policy: policies.count(policy) for policy in sorted(set(policies))},
        "num_answers": int(weights.sum()),
        "within": {"mean": float(np.average(shares, weights=weights)), "least": min(shares)},
        "longer_share": float(np.average(longer, weights=weights)),
        "missed_by_others": {
            "mean": float(np.average(missed, weights=weights * (1 - longer))),
            "most": float(missed.max()),
        },
        "throughput_error": {"least": min(errors), "most": max(errors)},
    }


def _algorithm_1(cases: list[Any]) -> dict[str, Any]:
    misses = misses_of(cases)
    return {
        "num_cases": misses.num_cases,
        "missed_share": misses.missed_share,
        "beyond_tolerance_share": misses.beyond_share,
        "num_not_found": misses.num_not_found,
        "worst_share": misses.worst_share,
        "num_evaluated": misses.num_evaluated,
        "num_evaluated_by_bounds": misses.num_evaluated_by_bounds,
    }


def _table_6() -> list[dict[str, Any]]:
    """Return the paper's four schedules of OPT 13B and task S, without margins."""
    scenario = Scenario("OPT-13B", "A40", 4, "S")
    deployment = replace(scenario.deployment(), encode_margin=0.0, decode_margin=0.0)
    lengths = scenario.lengths()
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
        "model", "task", "bound s", *BASELINES, *FAMILIES, "plan", "gain", "latency s", "policy",
        "degree", "B_E", "N_D", "B_m", "B_D", "chunk", "within", "search s", box=None,
        header_style="bold",
    )  # fmt: skip
    for point in result["points"]:
        table.add_row(*_cells(point))
    show(table)
    means = Table("mean gain", "paper", "rra and waa", "plan", box=None, header_style="bold")
    own = result["mean_gain_exegpt"], result["mean_gain_exegpt_over"]
    for name, paper in result["paper_mean_gain"].items():
        gains = own[0][name], result["mean_gain"][name]
        means.add_row(name, f"{paper:.1f}", *map(_shown, gains))
    for name, gain in result["mean_gain_over"].items():
        means.add_row(f"over {name}", "", _shown(own[1][name]), _shown(gain))
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


def _cells(point: dict[str, Any]) -> list[str]:
    name = f"{point['model']} {point['num_devices']}x{point['cluster']}"
    systems = [_shown(point["per_s_of"].get(each)) for each in (*BASELINES, *FAMILIES)]
    cells = [name, point["task"], _shown(point["bound_s"], "inf"), *systems]
    if "policy" not in point:
        return [*cells, "NS", "", f"{point['lowest_s']:.1f}", "none"]
    within = [run["within"] for run in point["played"] if run["policy"] == point["policy"]]
    return [
        *cells,
        _shown(point["per_s"]),
        _shown(point["gain"]),
        f"{point['latency_s']:.1f}",
        point["policy"],
        f"{point['degree']} on {point['num_sharded_devices']}",
        *(str(point[each]) for each in ("encode_batch", "num_decodes", "num_micro_batches")),
        f"{point['decode_batch']:.0f}",
        str(point["chunk_tokens"] or ""),
        f"{np.mean(within):.2%}" if within else "",
        f"{point['search_s']:.2f}",
    ]


def _shown(value: float | None, otherwise: str = "NS") -> str:
    return otherwise if value is None else f"{value:.2f}"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exegpt",
        description="The best schedules of ExeGPT's models, clusters and tasks under four latency "
        "bounds, from rooflines, beside other systems and the paper's own figures.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--models", default=",".join(MODELS), help="of table 1, separated by commas")
    text = "times that every chosen schedule is played by the real scheduler; 0 for estimates alone"
    add("--seeds", type=int, default=1, help=text)
    add("--output", type=Path, default=None, help="also write the object here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
