"""How well simulated runs predict real ones: `python -m benchmarks.simulate --help`.

Measures step times, plays the workload against every policy on the device as benchmarks.policies
does, and again on the simulated executor. A table on stderr, one JSON object on stdout.
docs/benchmarks.md says what each figure means.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rich.table import Table

from benchmarks import policies, serving
from benchmarks.output import command, show
from benchmarks.quiet import QUIET, Recording, in_quiet
from benchmarks.serving import arguments_of, parse_policies
from jaxserve.core.config import EngineConfig
from jaxserve.core.metrics import summarise
from jaxserve.core.prediction import LengthPrediction
from jaxserve.scheduling.policy import Policy
from jaxserve.workload import WorkloadItem

if TYPE_CHECKING:
    from jaxserve.planning import StepTimes
    from jaxserve.runtime.forecaster import Predictor

FIGURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "output_tokens_per_s": lambda figures: figures["output_tokens_per_s"],
    "latency_p50_s": lambda figures: figures["latency_s"]["p50"],
    "latency_p99_s": lambda figures: figures["latency_s"]["p99"],
    "first_token_p50_s": lambda figures: figures["time_to_first_token_s"]["p50"],
}
# Of the engine, as real runs have them too.
COUNTERS = ("num_steps", "num_iterations", "num_padding_tokens", "num_preemptions", "host_gap_s")
# Those that the worst error is taken over.
JUDGED = ("output_tokens_per_s", "latency_p99_s")


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the result; the exit code."""
    return command(run, _parser().parse_args(arguments), show_result=_print_table)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measured and predicted figures of every policy, and the errors of the predictions."""
    from benchmarks import environment
    from jaxserve.planning import StepTimes

    chosen = parse_policies(options.policies)
    order = [policy for _ in range(options.repeats) for policy in chosen]
    predictor = serving.load_predictor(options)
    played = [_play(options, policy, predictor) for policy in order]
    tables = [each.step_times for each in played]
    # Who shares the machine only ever slows it down: its own speed is that of quiet moments.
    times = StepTimes.quantile(tables, QUIET)
    if options.save_step_times is not None:
        times.save(options.save_step_times)
    runs = [_compare(policy.name, played, times) for policy in chosen]
    return {
        "benchmark": "simulate",
        "arguments": arguments_of(options),
        "runs": runs,
        "worst_error": max(abs(run["error"][name]) for run in runs for name in JUDGED),
        "machine_slowness": [_slowness(table, times) for table in tables],
        "step_times": {k: v for k, v in asdict(times).items() if k != "origin"},
        **environment.describe(),
    }


@final
@dataclass(frozen=True)
class _Played:
    """One run on the device, what was asked of it, and how long its steps take."""

    policy: Policy
    items: Sequence[WorkloadItem]
    config: EngineConfig
    step_times: StepTimes
    figures: dict[str, Any]
    recording: Recording
    predictions: list[LengthPrediction] | None


def _play(options: argparse.Namespace, policy: Policy, predictor: Predictor | None) -> _Played:
    from jaxserve import Runtime

    with Runtime.from_pretrained(
        options.model,
        policy=policy,
        max_slots=options.max_slots,
        max_context=options.max_context,
        kv_memory=options.kv_memory,
        predictor=predictor,
    ) as rt:
        items = policies.arriving_items(options, rt)
        if options.step_times is None:
            step_times = rt.measure_step_times(rounds=1)
        else:
            step_times = rt.load_step_times(options.step_times)
        figures, done = serving.measure(rt, items, label=policy.name)
        recording = Recording.of(rt, done)
        predictions = serving.predictions_of(predictor, items, rt.tokenizer)
        return _Played(policy, items, rt.config, step_times, figures, recording, predictions)


def _compare(policy: str, played: Sequence[_Played], times: StepTimes) -> dict[str, Any]:
    """The quiet moments of a policy's runs beside its simulation."""
    own = [each for each in played if each.policy.name == policy]
    rates = [each.figures["output_tokens_per_s"] for each in own]
    best = own[rates.index(max(rates))]
    others = [each.recording for each in played if each.policy.name != policy]
    measured = in_quiet(best.figures, [each.recording for each in own], others)
    predicted = _predict(best, times)
    return {
        "policy": policy,
        "measured": measured,
        "predicted": predicted,
        "error": {name: of(predicted) / of(measured) - 1 for name, of in FIGURES.items()},
        "output_tokens_per_s_of_every_run": rates,
    }


def _predict(played: _Played, times: StepTimes) -> dict[str, Any]:
    from jaxserve.planning import simulate

    begin_s = time.perf_counter()
    simulation = simulate(
        played.items,
        played.policy,
        played.config,
        times,
        predictions=played.predictions,
        chunk_cost=times.chunk_cost(),
    )
    took_s = time.perf_counter() - begin_s
    return {
        **summarise(simulation.completions, simulation.wall_s),
        "engine": {name: getattr(simulation.stats, name) for name in COUNTERS},
        "simulated_steps_per_s": simulation.stats.num_steps / took_s,
    }


def _slowness(table: StepTimes, quiet: StepTimes) -> float:
    """How much longer than in quiet moments the decode iterations of one table take."""
    ratios = [
        seconds / quiet.decode_s[size](positions)
        for size, curve in table.decode_s.items()
        for positions, seconds in curve.points
    ]
    return statistics.median(ratios)


def _print_table(result: dict[str, Any]) -> None:
    print("measured, predicted and the prediction's error:", file=sys.stderr)
    names = [name.removesuffix("_s").replace("_", " ") for name in FIGURES]
    table = Table("policy", *names, box=None, header_style="bold")
    for run in result["runs"]:
        cells = (
            f"{of(run['measured']):7.4g} {of(run['predicted']):7.4g} {run['error'][name]:+6.1%}"
            for name, of in FIGURES.items()
        )
        table.add_row(run["policy"], *cells)
    show(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate",
        description="Measured step times, real runs and simulated ones: a table and one JSON "
        "object with the errors of the predictions.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    policies.add_arguments(parser)
    add = parser.add_argument_group("step times").add_argument
    add("--step-times", type=Path, default=None, help="use these, measured here before")
    add("--save-step-times", type=Path, default=None, help="write the measured ones here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
