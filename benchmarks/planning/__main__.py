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

from benchmarks.common import environment
from benchmarks.common.environment import ROOT
from benchmarks.common.harness import Benchmark, arguments_of, print_table, whole_numbers
from benchmarks.common.policies import parse_policies
from benchmarks.common.repeats import Figures, add_repeats, in_turns, summary
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
        "benchmark": "planning",
        "arguments": arguments_of(options),
        "repeats": options.repeats,
        "points": {
            name: [summary(points) for points in zip(*own, strict=True)]
            for name, own in runs.items()
        },
        **environment.describe(),
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


def _print_table(result: dict[str, Any]) -> None:
    columns = [("planning_ms", share) for share in ("p50", "p99", "max")]
    columns += [("host_ms", "p50"), ("host_ms", "p99"), ("host_cpu_ms", "p50")]
    checkouts = result["points"]
    print_table(
        [
            {"checkout": checkout, **point}
            for same in zip(*checkouts.values(), strict=True)
            for checkout, point in zip(checkouts, same, strict=True)
        ],
        ("policy", "{policy}"),
        ("slots", "{max_slots}"),
        ("waiting", "{num_waiting}"),
        ("context", "{max_context}"),
        ("checkout", "{checkout}"),
        *(
            (f"{kind.removesuffix('_ms').replace('_', ' ')} {share}", f"{{{kind}[{share}]:.2f}}")
            for kind, share in columns
        ),
        title="ms a step",
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--policies", default=",".join(PRESETS), help="presets, separated by commas")
    add("--slots", default="8,64,512", help="sequences that run at once")
    add("--waiting", default="100,1000,10000", help="requests that wait")
    add("--contexts", default="1024,1000000", help="longest contexts; over 1024, some prompts too")
    add("--steps", type=int, default=300, help="that are timed, of each combination")
    add("--against", type=Path, default=None, help="another checkout, measured in turns")
    add_repeats(parser, "checkout")


BENCHMARK = Benchmark(__doc__, run, add_options, show=_print_table)
main = BENCHMARK.main


if __name__ == "__main__":
    sys.exit(main())
