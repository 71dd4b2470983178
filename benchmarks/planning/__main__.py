"""Time that planning and the whole host take a step: `python -m benchmarks.planning --help`.

The serving scheduler and engine run on the simulated executor, with full slots and many waiting
requests. `--against CHECKOUT` measures another checkout with the same file, in turns. A table on
stderr, one JSON object on stdout; docs/benchmarks/planning.md says what each figure means.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.common.environment import ROOT
from benchmarks.common.harness import Benchmark, option, whole_numbers
from benchmarks.common.policies import parse_policies
from benchmarks.common.repeats import Figures, in_turns, repeats, summary
from benchmarks.planning import host_time
from jaxserve.core.errors import InvalidConfigError
from jaxserve.scheduling.presets import PRESETS

HERE, OTHER = "here", "against"


def run(options: argparse.Namespace) -> dict[str, Any]:
    job = {
        "policies": [policy.name for policy in parse_policies(options.policies)],
        "contexts": whole_numbers(options.contexts, "--contexts"),
        "slots": whole_numbers(options.slots, "--slots"),
        "waiting": whole_numbers(options.waiting, "--waiting"),
        "steps": options.steps,
    }
    checkouts = {HERE: ROOT}
    if options.against is not None:
        if not (options.against / "jaxserve").is_dir():
            raise InvalidConfigError(
                f"--against {options.against}: the folder has no jaxserve; give a checkout"
            )
        checkouts[OTHER] = options.against.resolve()
    runs: dict[str, list[list[Figures]]] = {name: [] for name in checkouts}
    turns = list(in_turns(list(checkouts), options.repeats))
    for _, name in tqdm(turns, desc="planning", unit="run", leave=False, delay=2):
        runs[name].append(_points(job, checkouts[name]))
    return {
        "points": {
            name: [summary(points) for points in zip(*own, strict=True)]
            for name, own in runs.items()
        }
    }


def _points(job: dict[str, Any], checkout: Path) -> list[Figures]:
    done = subprocess.run(
        [sys.executable, host_time.__file__, json.dumps(job)],
        env={**os.environ, "PYTHONPATH": str(checkout)},
        cwd=checkout,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


OPTIONS = (
    option("--policies", ",".join(PRESETS), "presets, separated by commas"),
    option("--slots", "8,64,512", "sequences that run at once"),
    option("--waiting", "100,1000,10000", "requests that wait"),
    option("--contexts", "1024,1000000", "longest contexts; over 1024, some prompts too"),
    option("--steps", 300, "that are timed, of each combination"),
    option("--against", None, "another checkout, measured in turns", Path),
    repeats("checkout"),
)
main = Benchmark(__doc__, run, OPTIONS, "planning")


if __name__ == "__main__":
    sys.exit(main())
