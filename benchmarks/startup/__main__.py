"""Seconds from an empty process to the first token: `python -m benchmarks.startup MODEL`.

Each start is a new process. A cold start finds only the download: no compiled kernels, converted
weights, or executables. A warm start finds those that the cold one left. Run it alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from typing import Any

from benchmarks.common import environment
from benchmarks.common.harness import Benchmark, Record, arguments_of, option, some_of
from benchmarks.common.repeats import repeats, summary
from benchmarks.common.shapes import SHAPES, shape_folder
from benchmarks.startup.starts import cold_cache, start

KINDS = ("cold", "filling", "warm")


def run(options: argparse.Namespace) -> dict[str, Any]:
    kinds = some_of(options.kinds, "--kinds", KINDS)
    model, settings = options.model, options.settings
    # Not `Record.of`, since this process leaves the device's memory to those that it starts.
    record = Record(
        options.output,
        options.budget,
        benchmark="startup",
        arguments=arguments_of(options),
        repeats=options.repeats,
        model=model,
        settings=settings,
    )
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    with ExitStack() as stack:
        if model in SHAPES:
            model, settings = (
                stack.enter_context(shape_folder(model)),
                {"load": "random"} | settings,
            )
        for number in range(options.repeats):
            folder = stack.enter_context(cold_cache())
            for kind in kinds:
                if not record.allows(name := f"{kind} start {number}"):
                    continue
                # The rest of the work that the cold start did not wait for.
                own = {**settings, "warmup": "full"} if kind == "filling" else settings
                try:
                    runs[kind].append(start(model, own, folder))
                except Exception as error:  # of the process, which the record has
                    record.fail(name, error)
                    continue
                record.result[kind] = _figures(runs[kind])
                record.save()
    record.result |= environment.describe()
    record.save()
    return record.result


def _figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    executables = runs[-1]["executables"]
    numbers = [{k: v for k, v in one.items() if k != "executables"} for one in runs]
    return {**summary(numbers), "executables": executables}


OPTIONS = (
    option(
        "model", "smollm2-135m", f"a name, folder or GGUF file, or {', '.join(SHAPES)} at random"
    ),
    option("settings", {}, "JSON of further settings", json.loads),
    option("--kinds", ",".join(KINDS), "starts on one cache folder, in this order"),
    repeats("kind of start"),
)
main = Benchmark(__doc__, run, OPTIONS, "startup", has_budget=True)


if __name__ == "__main__":
    sys.exit(main())
