"""Conversations whose turns come back: `python -m benchmarks.conversations --help`.

Turns of ShareGPT in their order, each after the answer before and a reaction time (section 3.6.1 of
the Pensieve thesis), at rising rates, the policies in turns at each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import closing
from itertools import product
from typing import TYPE_CHECKING, Any

from benchmarks.common import sweep
from benchmarks.common.counters import of_simulation
from benchmarks.common.harness import Benchmark, numbers, option
from benchmarks.common.policies import missing_baselines, parse_policies, policy_options
from benchmarks.common.repeats import repeats
from benchmarks.common.serving import Runtimes, measure
from jaxserve.core.metrics import summarise
from jaxserve.scheduling.policy import Policy
from jaxserve.workload.conversations import Talk, Talks, sample

if TYPE_CHECKING:
    from jaxserve.runtime import Runtime

DEFAULT = "vllm_like,s3_oracle,pensieve_device_only,pensieve_lru,pensieve,auto"
Play = Callable[[Policy, list[Talk], str], dict[str, Any]]


def run(options: argparse.Namespace) -> dict[str, Any]:
    policies = {policy.name: policy for policy in parse_policies(options.policies)}
    rates = numbers(options.rates, "--rates")
    rounds = numbers(options.min_rounds, "--min-rounds")
    reactions = numbers(options.reaction_s, "--reaction-s")
    # A simulation is deterministic: one run is enough.
    num_repeats = 1 if options.simulated else options.repeats
    with Runtimes(options) as runtimes:
        play: Play = _simulator(runtimes) if options.simulated else _device(runtimes)

        def played(min_rounds: int, reaction_s: float) -> dict[str, Any]:
            """Play all policies at all rates, on conversations of `min_rounds` rounds or more."""
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
                return play(policies[name], talks, f"{name}, {rate:.3g} conversations/s")

            curves = sweep.play_every(at, list(policies), rates, repeats=num_repeats)
            return {
                "min_rounds": min_rounds,
                "reaction_s": reaction_s,
                "num_turns": num_turns,
                "policies": sweep.at_bound(curves, options.bound),
            }

        sets = [played(int(least), mean_s) for least, mean_s in product(rounds, reactions)]
    return {"repeats": num_repeats, "missing_baselines": missing_baselines(policies), "sets": sets}


def _device(runtimes: Runtimes) -> Play:
    opened: dict[str, Runtime] = {}

    def play(policy: Policy, talks: list[Talk], label: str) -> dict[str, Any]:
        client = Talks(talks)
        if policy.name not in opened:
            opened[policy.name] = runtimes.open(policy)
        rt = opened[policy.name]
        return measure(rt, client.items, label=label, follow_up=client.follow_up)[0]

    return play


def _simulator(runtimes: Runtimes) -> Play:
    from jaxserve.planning import simulate

    with closing(runtimes.open()) as rt:
        config, times = rt.config, rt.measure_step_times(rounds=1)

    def play(policy: Policy, talks: list[Talk], label: str) -> dict[str, Any]:
        client = Talks(talks)
        follow_up, cost = client.follow_up, times.chunk_cost()
        done = simulate(
            client.items, policy, config, times, follow_up=follow_up, chunk_cost=cost, label=label
        )
        return {**summarise(done.completions, done.wall_s), **of_simulation(done)}

    return play


OPTIONS = (
    option("--num-conversations", 32, "drawn from ShareGPT"),
    option("--min-rounds", "1,5", "sets, by the least number of rounds"),
    option("--reaction-s", "5", "sets, by the mean time between an answer and the next turn"),
    option("--rates", "0.25,0.5,1", "conversations that begin a second"),
    option("--scale", 0.25, "multiplies the lengths of all texts"),
    option("--bound", 0.1, "throughput is compared where p90 is this many seconds a token"),
    option("--seed", 0, "of the draw, the arrivals and the reactions"),
    option("--simulated", False, "measure step times once, and simulate the rest with them"),
    repeats("policy at every rate (once if simulated)"),
    *policy_options(DEFAULT),
)
main = Benchmark(__doc__, run, OPTIONS, "conversations")


if __name__ == "__main__":
    sys.exit(main())
