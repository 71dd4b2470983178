"""Policies compared on one workload: `python -m benchmarks.policies --help`.

Every policy serves the same requests on the same engine with the same memory. Whole runs alternate,
and the median of each figure is reported with its range.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from typing import Any

from benchmarks.common import workloads
from benchmarks.common.harness import Benchmark, option
from benchmarks.common.policies import (
    REQUEST_LEVEL_AND_ITERATION_LEVEL,
    missing_baselines,
    parse_policies,
    policy_options,
)
from benchmarks.common.repeats import Figures, repeats, summary, take_turns
from benchmarks.common.serving import Runtimes, measure


def run(options: argparse.Namespace) -> dict[str, Any]:
    policies = {policy.name: policy for policy in parse_policies(options.policies)}
    with Runtimes(options) as runtimes:

        def play(name: str) -> Figures:
            # One pool at a time: the memory need not hold one for each policy.
            with closing(runtimes.open(policies[name])) as rt:
                items = workloads.arriving_items(options, rt)
                return with_split(measure(rt, items, label=name)[0])

        runs = take_turns(list(policies), options.repeats, play)
    return {
        "missing_baselines": missing_baselines(policies),
        "policies": {name: summary(own) for name, own in runs.items()},
    }


def with_split(figures: Figures) -> Figures:
    """Add `latency_split_s` (figure 6 of the S3 paper): seconds of three parts of a run.

    Planning and predicting (`overhead`) mostly run while the device computes, so they are not part
    of a request's latency.
    """
    engine = figures["engine"]
    split = {
        "generation": figures["wall_s"] - engine["penalty_s"],
        "penalty": engine["penalty_s"],
        "overhead": engine["planning_s"] + engine["predicting_s"],
    }
    return {**figures, "latency_split_s": split}


OPTIONS = (
    *workloads.options(),
    option("--arrivals", None, workloads.ARRIVALS),
    repeats("policy"),
    *policy_options(REQUEST_LEVEL_AND_ITERATION_LEVEL),
)
main = Benchmark(__doc__, run, OPTIONS, "policies")


if __name__ == "__main__":
    sys.exit(main())
