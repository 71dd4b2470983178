"""Policies compared on one workload: `python -m benchmarks.policies --help`.

Every policy serves the same requests on the same engine with the same memory. Whole runs alternate,
and the median of each figure is reported with its range. A table on stderr, one JSON object on
stdout; docs/benchmarks/serving.md says what each figure means.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from typing import Any

from benchmarks.common import environment
from benchmarks.common.harness import Benchmark, arguments_of, print_table
from benchmarks.common.policies import (
    REQUEST_LEVEL_AND_ITERATION_LEVEL,
    add_policy_options,
    missing_baselines,
    parse_policies,
)
from benchmarks.common.repeats import Figures, add_repeats, in_turns, summary
from benchmarks.common.serving import Runtimes, measure
from benchmarks.common.workloads import ARRIVALS, add_arguments, arriving_items


def run(options: argparse.Namespace) -> dict[str, Any]:
    policies = {policy.name: policy for policy in parse_policies(options.policies)}
    turns = in_turns(list(policies), options.repeats)
    runs: dict[str, list[Figures]] = {name: [] for name in policies}
    with Runtimes(options) as runtimes:
        for number, name in turns:
            # One pool at a time: the memory need not hold one for each policy.
            with closing(runtimes.open(policies[name])) as rt:
                items = arriving_items(options, rt)
                figures, _ = measure(rt, items, label=f"{name}, run {number + 1}")
            runs[name].append(with_split(figures))
    return {
        "benchmark": "policies",
        "arguments": arguments_of(options),
        "repeats": options.repeats,
        "missing_baselines": missing_baselines(policies),
        "policies": {name: summary(own) for name, own in runs.items()},
        **environment.describe(),
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


def _print_table(result: dict[str, Any]) -> None:
    def lost(row: dict[str, Any]) -> str:
        split = row["latency_split_s"]
        return f"{(split['penalty'] + split['overhead']) / split['generation']:.1%}"

    rate = "{time_per_output_token_s[p50]:.3f}"
    print_table(
        [{"policy": name, **figures} for name, figures in result["policies"].items()],
        ("policy", "{policy}"),
        ("tokens/s", "{output_tokens_per_s:.0f}"),
        ("range", "{range[output_tokens_per_s][0]:.0f} to {range[output_tokens_per_s][1]:.0f}"),
        ("latency p50 s", "{latency_s[p50]:.1f}"),
        ("p99 s", "{latency_s[p99]:.1f}"),
        ("first token p50 s", "{time_to_first_token_s[p50]:.2f}"),
        ("s/token p50", lambda row: rate.format_map(row) if row["time_per_output_token_s"] else ""),
        ("batch", "{average_batch:.1f}"),
        ("iterations", "{engine[num_iterations]:.0f}"),
        ("padding", "{engine[num_padding_tokens]:.0f}"),
        ("preempted", "{engine[num_preemptions]:.0f}"),
        ("penalty + overhead", lost),
    )
    for name in result["missing_baselines"]:
        print(f"{name} is missing: predicted lengths are compared with it", file=sys.stderr)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    parser.add_argument("--arrivals", default=None, help=ARRIVALS)
    add_repeats(parser, "policy")
    add_policy_options(parser, policies=REQUEST_LEVEL_AND_ITERATION_LEVEL, max_context=1024)


BENCHMARK = Benchmark(__doc__, run, add_options, show=_print_table)
main = BENCHMARK.main


if __name__ == "__main__":
    sys.exit(main())
