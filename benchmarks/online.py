"""Latency against the rate of arrivals: `python -m benchmarks.online --help`.

Poisson arrivals at rising rates, the policies in turns at each. By default rates rise until p90 of
the normalised latency is five times that at the lowest rate, or throughput no longer rises.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

from benchmarks.common import sweep, workloads
from benchmarks.common.harness import Benchmark, numbers, option
from benchmarks.common.policies import parse_policies, policy_options
from benchmarks.common.repeats import repeats
from benchmarks.common.serving import Runtimes, measure
from jaxserve.core.metrics import goodput
from jaxserve.workload import WorkloadItem
from jaxserve.workload.items import with_arrivals

# Share of the rate at which requests that are answered one by one keep the device busy.
START_SHARE = 0.5


def run(options: argparse.Namespace) -> dict[str, Any]:
    policies = parse_policies(options.policies)
    given = None if options.rates is None else numbers(options.rates, "--rates")
    with Runtimes(options) as open_runtimes:
        runtimes = {policy.name: open_runtimes.open(policy) for policy in policies}
        items = workloads.items(options, next(iter(runtimes.values())))

        def play(name: str, rate: float) -> sweep.Figures:
            arriving = with_arrivals(items, f"poisson:{rate}", options.seed)
            label = f"{name}, {rate:.3g} requests/s"
            figures, done = measure(runtimes[name], arriving, label=label)
            if options.slo_ttft is not None or options.slo_tpot is not None:
                figures["goodput"] = goodput(
                    done,
                    figures["wall_s"],
                    max_first_token_s=_or_infinite(options.slo_ttft),
                    max_time_per_output_token_s=_or_infinite(options.slo_tpot),
                )
            return figures

        alone_s = {name: _alone_s(rt, items, name) for name, rt in runtimes.items()}
        if given is not None:
            curves = sweep.play_every(play, list(runtimes), given, repeats=options.repeats)
        else:
            start = START_SHARE / max(alone_s.values())
            curves = sweep.climb(play, list(runtimes), start=start, repeats=options.repeats)
    return {
        "policies": {
            name: {"alone_s": alone_s[name], **asdict(curve)} for name, curve in curves.items()
        }
    }


def _alone_s(rt: Any, items: list[WorkloadItem], name: str) -> float:
    """Return the seconds that the request of median answer length takes on an idle engine."""
    ordered = sorted(items, key=lambda item: item.num_output_tokens)
    figures, _ = measure(rt, [ordered[len(ordered) // 2]], label=f"{name}, one request alone")
    return figures["latency_s"]["p50"]


def _or_infinite(limit_s: float | None) -> float:
    return float("inf") if limit_s is None else limit_s


OPTIONS = (
    option("--rates", None, "requests a second, separated by commas: these and no other"),
    option("--slo-ttft", None, "goodput: most seconds to the first token", float),
    option("--slo-tpot", None, "goodput: most seconds an output token", float),
    *workloads.options(),
    repeats("policy at every rate"),
    *policy_options("fastertransformer,orca,vllm_like"),
)
main = Benchmark(__doc__, run, OPTIONS, "online")


if __name__ == "__main__":
    sys.exit(main())
