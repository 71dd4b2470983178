"""Time that planning and the whole host take a step: `python -m benchmarks.planning --help`.

The serving scheduler and engine run on the simulated executor, with full slots and many waiting
requests. `--against CHECKOUT` measures another checkout with the same file, in turns. A table on
stderr, one JSON object on stdout; docs/benchmarks/planning.md says what each figure means.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.harness import Benchmark, option, whole_numbers
from benchmarks.common.policies import parse_policies
from benchmarks.common.processes import checkouts, result_of
from benchmarks.common.repeats import Figures, repeats, summary, take_turns
from benchmarks.planning import host_time
from jaxserve.scheduling.presets import PRESETS


def run(options: argparse.Namespace) -> dict[str, Any]:
    job = {
        "policies": [policy.name for policy in parse_policies(options.policies)],
        "contexts": whole_numbers(options.contexts, "--contexts"),
        "slots": whole_numbers(options.slots, "--slots"),
        "waiting": whole_numbers(options.waiting, "--waiting"),
        "steps": options.steps,
    }
    folders = checkouts(options.against)

    def play(name: str) -> list[Figures]:
        return result_of(host_time.__file__, json.dumps(job), checkout=folders[name])

    runs = take_turns(list(folders), options.repeats, play)
    return {
        "points": {
            name: [summary(points) for points in zip(*own, strict=True)]
            for name, own in runs.items()
        }
    }


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
