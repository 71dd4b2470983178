"""Conversations that come back: `python -m benchmarks.conversations --help`.

Turns of ShareGPT in their order, each after the answer before and the time somebody takes to react
(section 3.6.1 of the Pensieve thesis), at rising rates, the policies taking turns at each. A table
on stderr, one JSON object on stdout. docs/benchmarks.md says what each figure means.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks import sweep
from benchmarks.output import command, show
from benchmarks.serving import Runtimes, add_policy_options, arguments_of, measure, parse_policies
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.metrics import summarise
from jaxserve.scheduling.policy import Policy
from jaxserve.workload.conversations import Talk, Talks, sample

if TYPE_CHECKING:
    from jaxserve.core.config import EngineConfig
    from jaxserve.planning import StepTimes
    from jaxserve.runtime import Runtime

STATELESS = "vllm_like"
DEFAULT = "vllm_like,pensieve_device_only,pensieve_lru,pensieve,auto"
# Of the engine, as simulated runs have them too.
COUNTERS = (
    *("num_steps", "num_iterations", "num_tokens", "num_preemptions", "num_recomputed"),
    *("num_sought", "num_found", "num_found_on_host", "num_lost", "num_pages_out", "num_pages_in"),
    "host_gap_s",
)
Play = Callable[[Policy, list[Talk], str], dict[str, Any]]


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the result; the exit code."""
    return command(run, _parser().parse_args(arguments), show_result=_print_table)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every policy's figures at every rate, for each set of conversations."""
    from benchmarks import environment

    policies = {policy.name: policy for policy in parse_policies(options.policies)}
    rates = sweep.rates_from(options.rates)
    rounds = _numbers(options.min_rounds, "--min-rounds")
    reactions = _numbers(options.reaction_s, "--reaction-s")
    with Runtimes(options) as runtimes:
        play: Play = _Simulator(runtimes, policies) if options.simulated else _device(runtimes)
        sets = [
            _sweep(options, play, runtimes, policies, rates, int(min_rounds), reaction_s)
            for min_rounds, reaction_s in itertools.product(rounds, reactions)
        ]
    return {
        "benchmark": "conversations",
        "arguments": arguments_of(options),
        "sets": sets,
        **environment.describe(),
    }


def _sweep(
    options: argparse.Namespace,
    play: Play,
    runtimes: Runtimes,
    policies: dict[str, Policy],
    rates: list[float],
    min_rounds: int,
    reaction_s: float,
) -> dict[str, Any]:
    """All policies at all rates, on conversations of so many rounds or more."""
    num_turns = 0

    def at(name: str, rate: float) -> sweep.Figures:
        nonlocal num_turns
        talks = sample(
            options.num_conversations,
            options.seed,
            tokenizer=runtimes.tokenizer,
            max_context=options.max_context,
            min_rounds=min_rounds,
            scale=options.scale,
            reaction_s=reaction_s,
            rate=rate,
        )
        num_turns = sum(len(talk.turns) for talk in talks)
        label = f"{name}, {rate:.3g} conversations/s"
        print(label, file=sys.stderr)
        return play(policies[name], talks, label)

    curves = sweep.play_every(at, list(policies), rates)
    served = {name: sweep.served_at(curve.points, options.bound) for name, curve in curves.items()}
    stateless = served.get(STATELESS)
    return {
        "min_rounds": min_rounds,
        "reaction_s": reaction_s,
        "num_turns": num_turns,
        "policies": {
            name: {
                **asdict(curve),
                "requests_per_s_at_bound": served[name],
                "of_stateless": _ratio(served[name], stateless),
            }
            for name, curve in curves.items()
        },
    }


def _ratio(served: float | None, stateless: float | None) -> float | None:
    return served / stateless if served and stateless else None


def _device(runtimes: Runtimes) -> Play:
    """On the device, a runtime a policy."""
    opened: dict[str, Runtime] = {}

    def play(policy: Policy, talks: list[Talk], label: str) -> dict[str, Any]:
        client = Talks(talks)
        if policy.name not in opened:
            opened[policy.name] = runtimes.open(policy)
        rt = opened[policy.name]
        return measure(rt, client.items, label=label, follow_up=client.follow_up)[0]

    return play


class _Simulator:
    """On the simulated executor, with step times measured once."""

    def __init__(self, runtimes: Runtimes, policies: dict[str, Policy]):
        with closing(runtimes.open(next(iter(policies.values())))) as rt:
            self._config: EngineConfig = rt.config
            self._times: StepTimes = rt.measure_step_times(rounds=1)

    def __call__(self, policy: Policy, talks: list[Talk], label: str) -> dict[str, Any]:
        from jaxserve.planning import simulate

        client = Talks(talks)
        simulation = simulate(
            client.items, policy, self._config, self._times,
            follow_up=client.follow_up, chunk_cost=self._times.chunk_cost(), label=label,
        )  # fmt: skip
        return {
            **summarise(simulation.completions, simulation.wall_s),
            "engine": {name: getattr(simulation.stats, name) for name in COUNTERS},
        }


def _numbers(text: str, option: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) <= 0:
        raise InvalidConfigError(
            f"{option} {text!r} is not understood; give numbers above 0, such as 1,5"
        )
    return numbers


def _print_table(result: dict[str, Any]) -> None:
    for each in result["sets"]:
        table = Table(
            "policy", "conversations/s", "requests/s", "tokens/s", "s/token p50", "p90",
            "first token p50 s", "found", "on host", "lost", box=None, header_style="bold",
            title=f"{each['min_rounds']} rounds or more, reaction {each['reaction_s']:g} s",
        )  # fmt: skip
        for name, curve in each["policies"].items():
            for point in curve["points"]:
                engine = point["engine"]
                sought = max(1, engine["num_sought"])
                table.add_row(
                    name,
                    f"{point['rate']:.3g}",
                    f"{point['requests_per_s']:.3g}",
                    f"{point['output_tokens_per_s']:.0f}",
                    f"{point['normalised_latency_s']['p50']:.3f}",
                    f"{point['normalised_latency_s']['p90']:.3f}",
                    f"{point['time_to_first_token_s']['p50']:.2f}",
                    f"{engine['num_found'] / sought:.0%}",
                    f"{engine['num_found_on_host'] / sought:.0%}",
                    str(engine["num_lost"]),
                )
            table.add_section()
        show(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.conversations",
        description="Conversations whose turns follow their answers, for every policy and rate. "
        "Prints a table and one JSON object.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--num-conversations", type=int, default=32, help="drawn from ShareGPT")
    add("--min-rounds", default="1,5", help="sets of conversations of so many rounds or more")
    add("--reaction-s", default="5", help="sets by the mean time that people take to go on")
    add("--rates", default="0.25,0.5,1", help="conversations that begin a second")
    add("--scale", type=float, default=0.25, help="multiplies the lengths of all texts")
    add("--bound", type=float, default=0.1, help="seconds a token, 90th percentile, of throughput")
    add("--seed", type=int, default=0, help="of the draw, the arrivals and the reactions")
    add(
        "--simulated",
        action="store_true",
        help="measure step times once, and play everything on the simulated executor",
    )
    add_policy_options(parser, policies=DEFAULT, max_context=1024)
    return parser


if __name__ == "__main__":
    sys.exit(main())
