"""Section 3.6 of the Pensieve thesis, simulated: `python -m benchmarks.pensieve --help`.

The thesis's models on its GPUs, as rooflines, under the scheduler, page cache and supervisor that
serve on a device. Tables on stderr, one JSON object on stdout; docs/benchmarks/papers.md says what
each figure means.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table
from tqdm import tqdm

from benchmarks.common.counters import PrefixCounts
from benchmarks.common.output import arguments_of, command, show
from benchmarks.pensieve.playing import (
    compare_with_stateless,
    cost_of,
    described,
    drawn_talks,
    played,
)
from benchmarks.pensieve.setup import MACHINES, MAX_CONTEXT, PAGE_TOKENS, PANELS, Panel
from jaxserve.core.errors import InvalidConfigError


def main(arguments: list[str] | None = None) -> int:
    """Run, print and write the result; return the exit code."""
    return command(run, build_parser().parse_args(arguments), show_result=_print_tables)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the curves of every panel."""
    from benchmarks.common import environment

    panels = panels_of(options)
    drawn = {
        rounds: drawn_talks(options, rounds) for rounds in {each.min_rounds for each in panels}
    }
    total = sum(len(panel.policies) for panel in panels)
    with tqdm(total=total, desc="curves", leave=False) as bar:
        sets = [played(options, panel, drawn[panel.min_rounds], bar) for panel in panels]
    compare_with_stateless(sets)
    return {
        "benchmark": "pensieve",
        "arguments": arguments_of(options),
        "conversations": {str(rounds): described(talks) for rounds, talks in sorted(drawn.items())},
        "chunk_cost_s": {
            name: {
                str(context): cost_of(options, name).chunk_cost(MAX_CONTEXT)(context)
                for context in (PAGE_TOKENS, 1024, 4096, MAX_CONTEXT)
            }
            for name in MACHINES
        },
        "sets": sets,
        **environment.describe(),
    }


def panels_of(options: argparse.Namespace) -> list[Panel]:
    wanted = options.figures.split(",")
    known = sorted({panel.figure for panel in PANELS})
    if not set(wanted) <= set(known):
        raise InvalidConfigError(
            f"--figures {options.figures!r} is not understood; give some of {', '.join(known)}, "
            "separated by commas"
        )
    return [panel for panel in PANELS if panel.figure in wanted]


def _eviction_pairs(each: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the points of LRU and of cost over time at the rates that both played (3.14)."""
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
        "model", "rate", "hit: LRU", "cost over time", "recomputed: LRU", "cost over time",
        "fewer", box=None, header_style="bold", title="3.14",
    )  # fmt: skip
    for each in result["sets"]:
        for pair in _eviction_pairs(each):
            lru, other = (PrefixCounts.of(point["engine"]) for point in pair)
            table.add_row(
                each["model"],
                f"{pair[0]['rate']:.2f}",
                *(f"{each.hit_share:.1%}" for each in (lru, other)),
                f"{lru.evicted:.0f}",
                f"{other.evicted:.0f}",
                f"{1 - other.evicted / lru.evicted:.1%}" if lru.evicted else "",
            )
    show(table)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pensieve",
        description="The Pensieve thesis's models on its GPUs, simulated with rooflines: figures "
        "3.12 to 3.16 with ShareGPT's conversations.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--figures", default="3.12,3.13,3.14,3.15,3.16", help="which to play")
    add(
        "--num-conversations",
        type=int,
        default=4000,
        help="drawn from ShareGPT; half as many with five rounds or more",
    )
    add(
        "--seconds",
        type=float,
        default=1200.0,
        help="virtual seconds in which conversations begin and go on",
    )
    add("--warm-up", type=float, default=500.0, help="seconds of these that do not count")
    add(
        "--bound",
        type=float,
        default=0.2,
        help="throughput is compared where p90 is this many seconds a token",
    )
    add(
        "--efficiency", type=float, default=0.5, help="share of the GPUs' rooflines that is reached"
    )
    add("--copies-before", action="store_true", help="swap before computing instead of beside it")
    add("--model", default="smollm2-135m", help="the model whose tokenizer counts")
    add("--seed", type=int, default=0, help="of the draw, the arrivals and the reactions")
    add("--output", type=Path, default=None, help="also write the object here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
