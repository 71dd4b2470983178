"""Seconds from an empty process to the first token: `python -m benchmarks.startup MODEL`.

Each start is a new process. A cold one finds the download alone: neither compiled kernels, nor
converted weights, nor executables. A warm one finds what the cold one left.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.harness import command
from benchmarks.common.repeats import add_repeats, in_turns, summary
from benchmarks.startup.starts import cold_cache, start


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the result; return the exit code."""
    return command(run, build_parser().parse_args(arguments))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of cold and of warm starts."""
    from benchmarks.common import environment

    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "filling": [], "warm": []}
    for _ in in_turns([options.model], options.repeats):
        with cold_cache() as folder:
            runs["cold"].append(start(options.model, options.settings, folder))
            # The rest of what the cold start did not wait for.
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
    """Return the median figures, and the executables of the last run."""
    executables = runs[-1]["executables"]
    numbers = [{k: v for k, v in one.items() if k != "executables"} for one in runs]
    return {**summary(numbers), "executables": executables}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup",
        description="Start a runtime in new processes, cold and warm, and print where the seconds "
        "go as JSON. Run it alone.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("model", nargs="?", default="smollm2-135m", help="a name, folder or GGUF file")
    add("settings", nargs="?", type=json.loads, default={}, help="JSON of further settings")
    add_repeats(parser, "kind of start")
    add("--output", type=Path, default=None, help="also write the result here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
