"""How well simulations predict real runs: `python -m benchmarks.planning.simulate --help`.

Each round measures step times once, and plays the workload against every policy on the device and
then on the simulated executor with those step times. A table on stderr, one JSON object on stdout;
docs/benchmarks/serving.md says what each figure means.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import workloads
from benchmarks.common.harness import Benchmark, option
from benchmarks.common.policies import (
    REQUEST_LEVEL_AND_ITERATION_LEVEL,
    parse_policies,
    policy_options,
    predictions_of,
)
from benchmarks.common.repeats import Figures, in_turns, repeats, summary
from benchmarks.common.serving import Runtimes, measure
from jaxserve.core.metrics import summarise

if TYPE_CHECKING:
    from jaxserve.core.config import EngineConfig
    from jaxserve.core.prediction import LengthPrediction
    from jaxserve.planning import StepTimes
    from jaxserve.runtime import Runtime
    from jaxserve.runtime.forecaster import Predictor
    from jaxserve.scheduling.policy import Policy
    from jaxserve.workload import WorkloadItem

FIGURES: dict[str, Callable[[Figures], float]] = {
    "output_tokens_per_s": lambda figures: figures["output_tokens_per_s"],
    "latency_p50_s": lambda figures: figures["latency_s"]["p50"],
    "latency_p99_s": lambda figures: figures["latency_s"]["p99"],
    "first_token_p50_s": lambda figures: figures["time_to_first_token_s"]["p50"],
}
# Counters of the engine that both kinds of runs report.
COUNTERS = ("num_steps", "num_iterations", "num_padding_tokens", "num_preemptions", "host_gap_s")
# The figures whose largest error is reported.
JUDGED = ("output_tokens_per_s", "latency_p99_s")


def run(options: argparse.Namespace) -> dict[str, Any]:
    policies = {policy.name: policy for policy in parse_policies(options.policies)}
    turns = in_turns(list(policies), options.repeats)
    runs: dict[str, list[Figures]] = {name: [] for name in policies}
    rounds: list[StepTimes] = []
    with Runtimes(options) as runtimes:
        for number, name in turns:
            with closing(runtimes.open(policies[name])) as rt:
                if len(rounds) == number:
                    rounds.append(_step_times(options, rt))
                label = f"{name}, run {number + 1}"
                runs[name].append(
                    _play(options, rt, policies[name], runtimes.predictor, rounds[number], label)
                )
    times = rounds[-1]
    if options.save_step_times is not None:
        times.save(options.save_step_times)
    summaries: list[dict[str, Any]] = [
        {"policy": name, **summary(own)} for name, own in runs.items()
    ]
    return {
        "policies": summaries,
        "worst_error": max(abs(each["error"][name]) for each in summaries for name in JUDGED),
        "step_times": {k: v for k, v in asdict(times).items() if k != "origin"},
    }


def _step_times(options: argparse.Namespace, rt: Runtime) -> StepTimes:
    if options.step_times is None:
        return rt.measure_step_times(rounds=1)
    return rt.load_step_times(options.step_times)


def _play(
    options: argparse.Namespace,
    rt: Runtime,
    policy: Policy,
    predictor: Predictor | None,
    times: StepTimes,
    label: str,
) -> Figures:
    items = workloads.arriving_items(options, rt)
    measured, _ = measure(rt, items, label=label)
    predictions = predictions_of(predictor, items, rt.tokenizer)
    predicted = _predict(items, policy, rt.config, times, predictions)
    error = {name: of(predicted) / of(measured) - 1 for name, of in FIGURES.items()}
    return {"measured": measured, "predicted": predicted, "error": error}


def _predict(
    items: list[WorkloadItem],
    policy: Policy,
    config: EngineConfig,
    times: StepTimes,
    predictions: list[LengthPrediction] | None,
) -> Figures:
    from jaxserve.planning import simulate

    begin_s = time.perf_counter()
    simulation = simulate(
        items, policy, config, times, predictions=predictions, chunk_cost=times.chunk_cost()
    )
    took_s = time.perf_counter() - begin_s
    return {
        **summarise(simulation.completions, simulation.wall_s),
        "engine": {name: getattr(simulation.stats, name) for name in COUNTERS},
        "simulated_steps_per_s": simulation.stats.num_steps / took_s,
    }


OPTIONS = (
    *workloads.options(),
    option("--arrivals", None, workloads.ARRIVALS),
    repeats("policy"),
    *policy_options(REQUEST_LEVEL_AND_ITERATION_LEVEL),
    option("--step-times", None, "step times of this machine; measured in each round if not", Path),
    option("--save-step-times", None, "write those of the last round here", Path),
)
main = Benchmark(__doc__, run, OPTIONS, "simulate")


if __name__ == "__main__":
    sys.exit(main())
