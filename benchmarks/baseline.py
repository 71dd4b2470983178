"""This checkout against another one, in turns: `python -m benchmarks.baseline CHECKOUT --help`.

What no change may make worse: output tokens/s, starts and their memory, planning with 10,000
waiting requests, the plans of ExeGPT's tasks, and requests/s of cells. Every measurement is a
process in one checkout, then in the other. Run it alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from benchmarks.common.harness import Benchmark, option, some_of
from benchmarks.common.processes import HERE, OTHER, checkouts, result_of
from benchmarks.common.repeats import Figures, ratio, repeats, summary, take_turns


@final
@dataclass(frozen=True)
class Measurement:
    """A benchmark of both checkouts, and the figures of its result that are compared."""

    command: str  # after `python -m benchmarks.`
    figures: Callable[[dict[str, Any]], Figures]


def _starts(result: dict[str, Any]) -> Figures:
    kinds = {"cold start": result["cold"], "warm start": result["warm"]}
    return {
        **{f"{kind}, s": own["first_token_s"] for kind, own in kinds.items()},
        **{f"{kind}, GB": own["resident_bytes"] / 1e9 for kind, own in kinds.items()},
    }


def _planning(result: dict[str, Any]) -> Figures:
    points = result["points"]["here"]
    return {f"{point['policy']}: planning, ms": point["planning_ms"]["p50"] for point in points}


def _plans(result: dict[str, Any]) -> Figures:
    tasks = sorted({point["task"] for point in result["points"]})
    return {
        f"task {task}: answers/s": statistics.geometric_mean(
            point["per_s"] for point in result["points"] if point["task"] == task
        )
        for task in tasks
    }


def _cells(result: dict[str, Any]) -> Figures:
    return {f"{p['application']}: requests/s": p["requests_per_s"] for p in result["points"]}


MEASUREMENTS = {
    "float32": Measurement(
        "offline --num-requests 32 --repeats 1",
        lambda result: {"output tokens/s": result["output_tokens_per_s"]},
    ),
    "int8": Measurement(
        "offline --num-requests 32 --repeats 1 --quantize int8",
        lambda result: {"output tokens/s": result["output_tokens_per_s"]},
    ),
    "start": Measurement("startup --repeats 1", _starts),
    "planning": Measurement(
        "planning --policies auto,s3,pensieve,exegpt --slots 64 --waiting 10000 --repeats 1",
        _planning,
    ),
    "plans": Measurement("exegpt --models OPT-13B,GPT3-101B --seeds 0", _plans),
    "cells": Measurement("cells.host --repeats 1", _cells),
}


def run(options: argparse.Namespace) -> dict[str, Any]:
    names = some_of(options.only or ",".join(MEASUREMENTS), "--only", MEASUREMENTS)
    folders = checkouts(options.checkout)
    return {"measurements": {name: _compared(name, folders, options.repeats) for name in names}}


def _compared(name: str, folders: dict[str, Path], repeats: int) -> dict[str, Any]:
    measurement = MEASUREMENTS[name]
    command = f"-m benchmarks.{measurement.command}".split()

    def play(checkout: str) -> Figures:
        return measurement.figures(result_of(*command, checkout=folders[checkout]))

    runs = take_turns(list(folders), repeats, play, at=name)
    return {
        **{checkout: summary(own) for checkout, own in runs.items()},
        "ratios": {
            figure: ratio(runs, figure, HERE, OTHER)
            for figure in runs[HERE][0]
            if figure in runs[OTHER][0]
        },
    }


OPTIONS = (
    option("checkout", None, "folder of the other checkout", Path, nargs=None),
    option("--only", None, f"some of {','.join(MEASUREMENTS)}"),
    repeats("checkout"),
)
main = Benchmark(__doc__, run, OPTIONS, "baseline")


if __name__ == "__main__":
    sys.exit(main())
