"""Policies on synthetic traces at several loads, simulated: `python -m benchmarks.arena --help`.

A load is a share of the requests a second that `vllm_like` serves if all of them wait at once. A
repeat is a part of its own of each trace, and the same for every policy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.harness import Benchmark, numbers, option, some_of
from benchmarks.common.policies import parse_policies
from benchmarks.common.repeats import Figures, repeats, summary
from jaxserve.core.errors import JaxserveError
from jaxserve.core.sizes import parse_bytes
from jaxserve.planning.arena import ArenaResults, ArenaRun, Contest, default_policies, play
from jaxserve.scheduling.presets import PRESETS
from jaxserve.workload.synthetic import SYNTHETIC

BASELINE = PRESETS["vllm_like"]
# `auto` with other predictions than those of `--prediction-error`: none, and nearly exact ones.
VARIANTS = {"auto_without_predictions": None, "auto_with_exact_lengths": 0.01}
BOUNDS_S = {"ttft": 1.0, "tpot": 0.1}


def run(options: argparse.Namespace) -> dict[str, Any]:
    shares = numbers(options.loads, "--loads")
    names = some_of(options.traces, "--traces", SYNTHETIC)
    return {
        "loads": [f"{share:.0%}" for share in shares],
        "bounds_s": BOUNDS_S,
        "traces": {name: _compared(name, shares, options) for name in names},
    }


def _compared(name: str, shares: Sequence[float], options: argparse.Namespace) -> Figures:
    """Return the figures of every policy and load on a trace."""
    contest = Contest.of(
        Path(name),
        options.repeats,
        loads=[1.0],
        pools=[parse_bytes(options.kv_memory)],
        progress=True,
        num_requests=options.num_requests,
        start_s=0.0,
        arrivals=None,
        max_tokens=None,
        prediction_error=options.prediction_error,
        model=options.model,
        device=options.device,
        max_slots=options.max_slots,
    )
    at_once_per_s = _served_at_once(contest)
    # A synthetic trace has one request a second, so its load is the rate.
    loads = {f"{share:.0%}": share * at_once_per_s for share in shares}
    contest = replace(contest, loads=list(loads.values()))
    policies = default_policies() if options.policies is None else parse_policies(options.policies)
    cells = contest.cells([(BASELINE, None), *((each, None) for each in policies)])
    for variant, error in VARIANTS.items() if options.policies is None else ():
        base = replace(contest.base, prediction_error=error)
        own = replace(PRESETS["auto"], name=variant)
        cells |= replace(contest, base=base).cells([(own, None)])
    kept = ArenaResults()
    contest.simulate(cells, kept, progress=True)
    figures = {
        (policy, load): [_figures(contest, kept, run) for run, _ in runs]
        for (policy, load, _), runs in cells.items()
    }
    return {
        "at_once_per_s": at_once_per_s,
        "policies": {
            policy: {
                "loads": {
                    label: summary(
                        [
                            {**own, "over_baseline": _over(own, other)}
                            for own, other in zip(
                                figures[policy, load], figures[BASELINE.name, load], strict=True
                            )
                        ]
                    )
                    for label, load in loads.items()
                }
            }
            for policy in dict.fromkeys(policy for policy, _ in figures)
        },
    }


def _served_at_once(contest: Contest) -> float:
    """Return the requests a second of the baseline if all of the first part wait at once."""
    [[(first, policy), *_]] = contest.cells([(BASELINE, None)]).values()
    result = play(replace(first, arrivals="all"), contest.parts[0], policy)
    return len(result.requests) / result.wall_s


def _figures(contest: Contest, kept: ArenaResults, run: ArenaRun) -> Figures:
    """Return the figures of a run that the result has."""
    result = kept.get(run)
    assert result is not None, "it was simulated"
    if result.error:
        raise JaxserveError(f"{run.policy} failed: {result.error}")
    whole = contest.figures(result, run.seed, BOUNDS_S)
    counts = ("output_tokens_per_s", "fairness", "num_preemptions", "hit_share")
    spreads = ("latency_s", "time_to_first_token_s", "time_per_output_token_s")
    return {
        **{name: whole[name] for name in counts},
        **{name: {p: whole[name][p] for p in ("p50", "p90", "p99")} for name in spreads},
        "goodput": whole["goodput"]["share"],
    }


def _over(own: Figures, baseline: Figures) -> Figures:
    """Return the ratios of a run's latencies to those of the baseline's on the same requests."""
    return {p: own["latency_s"][p] / baseline["latency_s"][p] for p in ("p50", "p99")}


OPTIONS = (
    option("--traces", ",".join(SYNTHETIC), "separated by commas"),
    option("--policies", None, "separated by commas; by default all with a schedule of their own"),
    option("--loads", "0.5,0.8,1.2", "shares of what vllm_like serves at once"),
    repeats("policy"),
    option("--num-requests", 200, "of each run"),
    option("--prediction-error", 0.7, "standard deviation of the logarithm of predicted lengths"),
    option("--model", "Llama-3-8B", "whose sizes give the times; weights are not needed"),
    option("--device", "A100", "whose roofline gives the times"),
    option("--kv-memory", "4GiB", "of the page pool; the host has as much again"),
    option("--max-slots", 256, "most sequences at once"),
)
main = Benchmark(__doc__, run, OPTIONS, "arena")


if __name__ == "__main__":
    sys.exit(main())
