"""Seconds from an empty process to the first token: `python -m benchmarks.startup MODEL`.

Each start is a new process. A cold start finds only the download: no compiled kernels, converted
weights, or executables. A warm start finds those that the cold one left. Run it alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from benchmarks.common.harness import Benchmark, option
from benchmarks.common.repeats import repeats, summary
from benchmarks.startup.starts import cold_cache, start


def run(options: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "filling": [], "warm": []}
    for _ in range(options.repeats):
        with cold_cache() as folder:
            runs["cold"].append(start(options.model, options.settings, folder))
            # The rest of the work that the cold start did not wait for.
            filling = {**options.settings, "warmup": "full"}
            runs["filling"].append(start(options.model, filling, folder))
            runs["warm"].append(start(options.model, options.settings, folder))
    return {
        "model": options.model,
        "settings": options.settings,
        **{kind: _figures(of_kind) for kind, of_kind in runs.items()},
    }


def _figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    executables = runs[-1]["executables"]
    numbers = [{k: v for k, v in one.items() if k != "executables"} for one in runs]
    return {**summary(numbers), "executables": executables}


OPTIONS = (
    option("model", "smollm2-135m", "a name, folder or GGUF file"),
    option("settings", {}, "JSON of further settings", json.loads),
    repeats("kind of start"),
)
main = Benchmark(__doc__, run, OPTIONS, "startup")


if __name__ == "__main__":
    sys.exit(main())
