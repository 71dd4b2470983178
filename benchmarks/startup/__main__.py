"""Seconds from an empty process to the first token: `python -m benchmarks.startup MODEL`.

Each start is a new process. A cold start finds only the download: no compiled kernels, converted
weights, or executables. A warm start finds those that the cold one left. Run it alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from benchmarks.common import environment
from benchmarks.common.harness import Benchmark
from benchmarks.common.repeats import add_repeats, in_turns, summary
from benchmarks.startup.starts import cold_cache, start


def run(options: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "filling": [], "warm": []}
    for _ in in_turns([options.model], options.repeats):
        with cold_cache() as folder:
            runs["cold"].append(start(options.model, options.settings, folder))
            # The rest of the work that the cold start did not wait for.
            filling = {**options.settings, "warmup": "full"}
            runs["filling"].append(start(options.model, filling, folder))
            runs["warm"].append(start(options.model, options.settings, folder))
    return {
        "benchmark": "startup",
        "model": options.model,
        "settings": options.settings,
        "repeats": options.repeats,
        **{kind: _figures(of_kind) for kind, of_kind in runs.items()},
        **environment.describe(),
    }


def _figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    executables = runs[-1]["executables"]
    numbers = [{k: v for k, v in one.items() if k != "executables"} for one in runs]
    return {**summary(numbers), "executables": executables}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", default="smollm2-135m", help="a name, folder or GGUF file")
    add("settings", nargs="?", type=json.loads, default={}, help="JSON of further settings")
    add_repeats(parser, "kind of start")


BENCHMARK = Benchmark(__doc__, run, add_options)
main = BENCHMARK.main


if __name__ == "__main__":
    sys.exit(main())
