"""Section 3.6 of the Pensieve thesis, simulated: `python -m benchmarks.pensieve --help`.

The thesis's models on its GPUs, as rooflines; our scheduler, page cache and supervisor as they
serve. Tables on stderr, one JSON object on stdout. docs/benchmarks.md says what each figure means.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
from rich.table import Table
from tqdm import tqdm

from benchmarks import sweep
from benchmarks.output import command, show
from benchmarks.pensieve_setup import (
    KNOWN,
    MACHINES,
    MAX_CONTEXT,
    PAGE_TOKENS,
    PANELS,
    STATELESS,
    Panel,
)
from benchmarks.serving import arguments_of
from benchmarks.sweep import Curve
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.metrics import summarise
from jaxserve.planning import RooflineCost, simulate
from jaxserve.workload.conversations import Talk, Talks, sample

# Rates of a curve, each so many times the one before.
FACTOR = 1.4
COUNTERS = (
    *("num_steps", "num_iterations", "num_tokens", "num_preemptions", "num_pages_out"),
    *("num_pages_in", "num_sought", "num_found", "num_found_on_host", "num_lost"),
)


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the result; the exit code."""
    return command(run, _parser().parse_args(arguments), show_result=_print_tables)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every panel's curves."""
    from benchmarks import environment

    panels = _panels(options)
    drawn = {rounds: _drawn(options, rounds) for rounds in {each.min_rounds for each in panels}}
    total = sum(len(panel.policies) for panel in panels)
    with tqdm(total=total, desc="curves", leave=False) as bar:
        sets = [_played(options, panel, drawn[panel.min_rounds], bar) for panel in panels]
    _compare(sets)
    return {
        "benchmark": "pensieve",
        "arguments": arguments_of(options),
        "conversations": {
            str(rounds): _described(talks) for rounds, talks in sorted(drawn.items())
        },
        "chunk_cost_s": {
            name: {
                str(context): _cost(options, name).chunk_cost(MAX_CONTEXT)(context)
                for context in (PAGE_TOKENS, 1024, 4096, MAX_CONTEXT)
            }
            for name in MACHINES
        },
        "sets": sets,
        **environment.describe(),
    }


def _played(
    options: argparse.Namespace, panel: Panel, talks: Sequence[Talk], bar: tqdm
) -> dict[str, Any]:
    """Policies at rising rates, each until its 90th percentile is beyond the panel's bound."""
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

        def at(rate: float, name: str = name) -> dict[str, Any]:
            bar.set_postfix_str(f"{panel.figure}, {panel.model}, {name}, {rate:.2f}/s")
            begun = _beginning(talks, rate / turns_each, panel.reaction_s, options.seconds)
            return {"rate": rate, **_Run(panel, name, begun, options).figures()}

        curves[name] = _curve(at, lowest, highest, panel.bounds * options.bound)
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


def _curve(
    at: Callable[[float], dict[str, Any]], lowest: float, highest: float, bound_s: float
) -> Curve:
    """Rates that rise until the bound is passed, and one more between the last two.

    Args:
      highest: beyond it there are not enough conversations.
    """
    points: list[dict[str, Any]] = []
    while not points or sweep.p90(points[-1]) <= bound_s:
        rate = lowest * FACTOR ** len(points)
        if rate > highest:
            return Curve(points, stopped_by="number of conversations")
        points.append(at(rate))
    if len(points) > 1:
        points.insert(-1, at(points[-1]["rate"] / FACTOR**0.5))
    return Curve(points, stopped_by="bound")


def _compare(sets: Sequence[dict[str, Any]]) -> None:
    """Say how many times as much as stateless serving everybody serves at the bound."""
    for each in sets:
        other = each["policies"].get(STATELESS, {}).get("requests_per_s_at_bound")
        for curve in each["policies"].values():
            own = curve["requests_per_s_at_bound"]
            curve["of_stateless"] = own / other if own and other else None


@final
@dataclass(frozen=True)
class _Run:
    """One policy at one rate."""

    panel: Panel
    policy: str
    talks: Sequence[Talk]
    options: argparse.Namespace

    def figures(self) -> dict[str, Any]:
        """Of the requests that ended after the warm-up, and what the engine counted in all."""
        machine = MACHINES[self.panel.model]
        cost = _cost(self.options, self.panel.model)
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
            "engine": {name: getattr(done.stats, name) for name in COUNTERS},
        }


def _cost(options: argparse.Namespace, model: str) -> RooflineCost:
    return MACHINES[model].cost(
        efficiency=options.efficiency, hides_copies=not options.copies_before
    )


def _drawn(options: argparse.Namespace, min_rounds: int) -> list[Talk]:
    """Conversations that begin every second, and whose people take a second to react."""
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


def _beginning(talks: Sequence[Talk], rate: float, reaction_s: float, seconds: float) -> list[Talk]:
    """Those that begin in time, so many a second, with so long to react."""
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


def _described(talks: Sequence[Talk]) -> dict[str, float]:
    """As table 3.2."""
    turns = [turn for talk in talks for turn in talk.turns]
    return {
        "num_conversations": len(talks),
        "mean_turns": len(turns) / len(talks),
        "mean_input_tokens": float(np.mean([len(turn.token_ids) for turn in turns])),
        "mean_output_tokens": float(np.mean([turn.num_output_tokens for turn in turns])),
        "mean_context": float(np.mean([talk.num_tokens for talk in talks])),
    }


def _panels(options: argparse.Namespace) -> list[Panel]:
    wanted = options.figures.split(",")
    known = sorted({panel.figure for panel in PANELS})
    if not set(wanted) <= set(known):
        raise InvalidConfigError(
            f"--figures {options.figures!r} is not understood; give some of {', '.join(known)} "
            "with commas between them"
        )
    return [panel for panel in PANELS if panel.figure in wanted]


def _eviction_pairs(each: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Figure 3.14: points of LRU and of cost over time at the rates of a set that both played."""
    policies = each["policies"]
    if {"pensieve_lru", "pensieve"} <= policies.keys():
        by_rate = {point["rate"]: point for point in policies["pensieve"]["points"]}
        for lru in policies["pensieve_lru"]["points"]:
            if lru["rate"] in by_rate:
                yield lru, by_rate[lru["rate"]]


def _print_tables(result: dict[str, Any]) -> None:
    table = Table(
        "figure", "model", "rounds", "reaction s", "policy", "requests/s at bound", "of stateless",
        "thesis", box=None, header_style="bold",
    )  # fmt: skip
    for each in result["sets"]:
        for name, curve in each["policies"].items():
            served, ratio = curve["requests_per_s_at_bound"], curve["of_stateless"]
            table.add_row(
                each["figure"],
                each["model"],
                str(each["min_rounds"]),
                f"{each['reaction_s']:g}",
                name,
                "" if served is None else f"{served:.2f}",
                "" if ratio is None else f"{ratio:.2f}",
                f"{each['gain']}" if name == "pensieve" and each["gain"] else "",
            )
    show(table)
    table = Table(
        "model", "rate", "found: LRU", "cost over time", "recomputed: LRU", "cost over time",
        "fewer", box=None, header_style="bold", title="3.14",
    )  # fmt: skip
    for each in result["sets"]:
        for pair in _eviction_pairs(each):
            lru, other = (point["engine"] for point in pair)
            table.add_row(
                each["model"],
                f"{pair[0]['rate']:.2f}",
                *(f"{e['num_found'] / max(1, e['num_sought']):.1%}" for e in (lru, other)),
                str(lru["num_lost"]),
                str(other["num_lost"]),
                f"{1 - other['num_lost'] / lru['num_lost']:.1%}" if lru["num_lost"] else "",
            )
    show(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pensieve",
        description="The Pensieve thesis's models on its GPUs, simulated with rooflines: figures "
        "3.12 to 3.16 with ShareGPT's conversations.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--figures", default="3.12,3.13,3.14,3.15,3.16", help="which to play")
    add("--num-conversations", type=int, default=4000, help="of ShareGPT; half of long ones")
    add("--seconds", type=float, default=1200.0, help="in which conversations begin and go on")
    add("--warm-up", type=float, default=500.0, help="seconds of these that are not counted")
    add("--bound", type=float, default=0.2, help="seconds a token, 90th percentile, of throughput")
    add("--efficiency", type=float, default=0.5, help="share of the GPUs' roofs that is reached")
    add("--copies-before", action="store_true", help="swap before computing, not beside it")
    add("--model", default="smollm2-135m", help="whose tokenizer counts")
    add("--seed", type=int, default=0, help="of the draw, the arrivals and the reactions")
    add("--output", type=Path, default=None, help="also write the object here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
