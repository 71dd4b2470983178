"""Latency against the rate of arrivals: `python -m benchmarks.online --help`.

Poisson arrivals at rising rates, the policies in turns at each. By default rates rise until p90 of
the normalised latency is five times that at the lowest rate, or throughput no longer rises. A table
on stderr, one JSON object on stdout; docs/benchmarks/serving.md says what each figure means.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

from benchmarks.common import environment, sweep, workloads
from benchmarks.common.harness import Benchmark, arguments_of, numbers, print_table
from benchmarks.common.policies import add_policy_options, parse_policies
from benchmarks.common.repeats import add_repeats
from benchmarks.common.serving import Runtimes, measure
from jaxserve.core.metrics import goodput
from jaxserve.workload import WorkloadItem
from jaxserve.workload.items import with_arrivals

# Share of the rate at which requests that are answered one by one keep the device busy.
START_SHARE = 0.5


def run(options: argparse.Namespace) -> dict[str, Any]:
    policies = parse_policies(options.policies)
    given = None if options.rates is None else numbers(options.rates, "--rates")
    sweep.geometric(1.0 if options.start_rate is None else options.start_rate, options.factor)
    with Runtimes(options) as open_runtimes:
        runtimes = {policy.name: open_runtimes.open(policy) for policy in policies}
        items = workloads.items(options, next(iter(runtimes.values())))

        def play(name: str, rate: float) -> sweep.Figures:
            arriving = with_arrivals(items, f"poisson:{rate}", options.seed)
            label = f"{name}, {rate:.3g} requests/s"
            print(label, file=sys.stderr)
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
            start = options.start_rate
            if start is None:
                start = START_SHARE / max(alone_s.values())
            curves = sweep.climb(
                play,
                list(runtimes),
                start=start,
                factor=options.factor,
                max_rates=options.max_rates,
                repeats=options.repeats,
            )
    return {
        "benchmark": "online",
        "arguments": arguments_of(options),
        "repeats": options.repeats,
        "policies": {
            name: {"alone_s": alone_s[name], **asdict(curve)} for name, curve in curves.items()
        },
        **environment.describe(),
    }


def _alone_s(rt: Any, items: list[WorkloadItem], name: str) -> float:
    """Return the seconds that the request of median answer length takes on an idle engine."""
    ordered = sorted(items, key=lambda item: item.num_output_tokens)
    figures, _ = measure(rt, [ordered[len(ordered) // 2]], label=f"{name}, one request alone")
    return figures["latency_s"]["p50"]


def _or_infinite(limit_s: float | None) -> float:
    return float("inf") if limit_s is None else limit_s


def _print_table(result: dict[str, Any]) -> None:
    within = "{goodput[requests_per_s]:.3g}/s, {goodput[share]:.0%}"
    print_table(
        [
            {"policy": name, **point}
            for name, curve in result["policies"].items()
            for point in curve["points"]
        ],
        ("policy", "{policy}"),
        ("requests/s", "{rate:.3g}"),
        ("served", "{requests_per_s:.3g}"),
        ("tokens/s", "{output_tokens_per_s:.0f}"),
        ("latency p50 s", "{latency_s[p50]:.1f}"),
        ("p99 s", "{latency_s[p99]:.1f}"),
        ("s/token p50", "{normalised_latency_s[p50]:.3f}"),
        ("p90", "{normalised_latency_s[p90]:.3f}"),
        ("first token p90 s", "{time_to_first_token_s[p90]:.2f}"),
        ("goodput", lambda point: within.format_map(point) if point.get("goodput") else ""),
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rates", default=None, help="requests a second, separated by commas: these and no other")
    add(
        "--start-rate",
        type=float,
        default=None,
        help="requests a second to rise from; half of what one by one would be served if not given",
    )
    add("--factor", type=float, default=2.0, help="from one rate to the next")
    add("--max-rates", type=int, default=8, help="most rates a policy")
    add("--slo-ttft", type=float, default=None, help="goodput: most seconds to the first token")
    add("--slo-tpot", type=float, default=None, help="goodput: most seconds an output token")
    workloads.add_arguments(parser)
    add_repeats(parser, "policy at every rate")
    add_policy_options(parser, policies="fastertransformer,orca,vllm_like", max_context=1024)


BENCHMARK = Benchmark(__doc__, run, add_options, show=_print_table)
main = BENCHMARK.main


if __name__ == "__main__":
    sys.exit(main())
