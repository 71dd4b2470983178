"""One policy on the conversations of a panel of the Pensieve thesis, simulated."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import final

import numpy as np
from tqdm import tqdm

from benchmarks.common import sweep
from benchmarks.common.counters import average_batch, counters_of
from benchmarks.common.repeats import Figures
from benchmarks.common.sweep import Curve
from benchmarks.pensieve.setup import KNOWN, MACHINES, MAX_CONTEXT, STATELESS, Panel
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.metrics import summarise
from jaxserve.planning import RooflineCost, simulate
from jaxserve.workload.conversations import Talk, Talks, sample

# From one rate of a curve to the next.
FACTOR = 1.4


def played(options: argparse.Namespace, panel: Panel, talks: Sequence[Talk], bar: tqdm) -> Figures:
    """Play the policies at rising rates, each until its p90 is beyond the panel's bound."""
    turns_each = float(np.mean([len(talk.turns) for talk in talks]))
    lowest = MACHINES[panel.model].requests_per_s
    highest = turns_each * talks[-1].arrival_s / options.seconds
    if highest < lowest:
        raise InvalidConfigError(
            f"{len(talks)} conversations are {highest:.2f} requests a second for "
            f"{options.seconds:g} s, and {panel.model} is to have {lowest:g} or more; give more "
            "--num-conversations or fewer --seconds"
        )
    curves: dict[str, Curve] = {}
    for name in panel.policies:

        def at(rate: float, name: str = name) -> Figures:
            bar.set_postfix_str(f"{panel.figure}, {panel.model}, {name}, {rate:.2f}/s")
            begun = beginning(talks, rate / turns_each, panel.reaction_s, options.seconds)
            return {"rate": rate, **Run(panel, name, begun, options).figures()}

        curves[name] = curve_of(at, lowest, highest, panel.bounds * options.bound)
        last = curves[name].points[-1]
        bar.write(
            f"{panel.figure}, {panel.model}, {name}: {last['requests_per_s']:.2f} requests/s at "
            f"{sweep.p90(last):.3f} s a token, stopped by {curves[name].stopped_by}",
            file=sys.stderr,
        )
        bar.update()
    return {
        **{name: value for name, value in asdict(panel).items() if name != "policies"},
        "policies": {
            name: {
                **asdict(curve),
                "requests_per_s_at_bound": sweep.served_at(curve.points, options.bound),
            }
            for name, curve in curves.items()
        },
    }


def curve_of(
    at: Callable[[float], Figures], lowest: float, highest: float, bound_s: float
) -> Curve:
    """Play rates that rise until p90 is beyond the bound, and one between the last two.

    Args:
      highest: the rate beyond which the conversations do not suffice.
    """
    points: list[Figures] = []
    while not points or sweep.p90(points[-1]) <= bound_s:
        rate = lowest * FACTOR ** len(points)
        if rate > highest:
            return Curve(points, stopped_by="number of conversations")
        points.append(at(rate))
    if len(points) > 1:
        points.insert(-1, at(points[-1]["rate"] / FACTOR**0.5))
    return Curve(points, stopped_by="bound")


def compare_with_stateless(sets: Sequence[Figures]) -> None:
    """Add `of_stateless`: requests served at the bound over those of stateless serving."""
    for each in sets:
        other = each["policies"].get(STATELESS, {}).get("requests_per_s_at_bound")
        for curve in each["policies"].values():
            own = curve["requests_per_s_at_bound"]
            curve["of_stateless"] = own / other if own and other else None


@final
@dataclass(frozen=True)
class Run:
    """One policy at one rate."""

    panel: Panel
    policy: str
    talks: Sequence[Talk]
    options: argparse.Namespace

    def figures(self) -> Figures:
        """Return figures of requests that ended after the warm-up, and the engine's counters."""
        machine = MACHINES[self.panel.model]
        cost = cost_of(self.options, self.panel.model)
        client = Talks(self.talks)
        done = simulate(
            client.items,
            KNOWN[self.policy],
            machine.config(cost),
            cost,
            follow_up=client.follow_up,
            chunk_cost=cost.chunk_cost(MAX_CONTEXT),
            swap_costs=cost.swap_costs(),
            until_s=self.options.seconds,
            progress=False,
        )
        warm_up_s = self.options.warm_up
        counted = [each for each in done.completions if (each.timing.finished_s or 0) >= warm_up_s]
        return {
            **summarise(counted, self.options.seconds - warm_up_s),
            "average_batch": average_batch(done.steps),
            "engine": counters_of(done.stats),
        }


def cost_of(options: argparse.Namespace, model: str) -> RooflineCost:
    return MACHINES[model].cost(
        efficiency=options.efficiency, hides_copies=not options.copies_before
    )


def drawn_talks(options: argparse.Namespace, min_rounds: int) -> list[Talk]:
    """Return conversations that begin every second, with reactions of one second on average."""
    from jaxserve.models.tokenizer import Tokenizer

    return sample(
        options.num_conversations if min_rounds == 1 else options.num_conversations // 2,
        options.seed,
        tokenizer=Tokenizer.of_model(options.model),
        max_context=MAX_CONTEXT,
        min_rounds=min_rounds,
        reaction_s=1.0,
        rate=1.0,
        whole=True,
    )


def beginning(talks: Sequence[Talk], rate: float, reaction_s: float, seconds: float) -> list[Talk]:
    """Return the conversations that begin within `seconds`, at this rate and reaction time."""
    return [
        replace(
            talk,
            arrival_s=talk.arrival_s / rate,
            turns=tuple(
                replace(turn, reaction_s=reaction_s * turn.reaction_s) for turn in talk.turns
            ),
        )
        for talk in talks
        if talk.arrival_s < rate * seconds
    ]


def described(talks: Sequence[Talk]) -> dict[str, float]:
    """Return the statistics of table 3.2."""
    turns = [turn for talk in talks for turn in talk.turns]
    return {
        "num_conversations": len(talks),
        "mean_turns": len(turns) / len(talks),
        "mean_input_tokens": float(np.mean([len(turn.token_ids) for turn in turns])),
        "mean_output_tokens": float(np.mean([turn.num_output_tokens for turn in turns])),
        "mean_context": float(np.mean([talk.num_tokens for talk in talks])),
    }
