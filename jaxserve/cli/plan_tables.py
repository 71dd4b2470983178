"""The tables of `jaxserve plan`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from jaxserve.planning.schedules import LatencyBounds, Schedule
    from jaxserve.planning.schedules.frontier import Frontier, Outcome

_NAMES = {"rra": "RRA", "waa_c": "WAA-C", "waa_m": "WAA-M", "continuous": "continuous"}


def frontier_table(frontier: Frontier, chosen: Mapping[float, Outcome]) -> Table:
    """Return a row for each point of the frontier; those that are chosen are marked.

    The control is N_D of RRA, B_m of WAA, and B of continuous batching; on two groups that exist it
    is the iterations of a decode step, N_D. Stages, which only schedules of a cluster have, are as
    in `stages_of`.
    """
    from rich import box
    from rich.table import Table

    [estimate] = {outcome.estimate for _, outcome in frontier.points}
    table = Table(
        title=f"best schedule for each latency bound ({estimate})",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("")
    table.add_column("bound", justify="right", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    for name in ("B_E", "control", "B_D"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("answers/s", "tokens/s", "p99 answer", "1st token", "a token"):
        table.add_column(name, justify="right", no_wrap=True)
    has_stages = any(outcome.schedule.stages for _, outcome in frontier.points)
    if has_stages:
        table.add_column("stages", overflow="fold")
    marked = [outcome.schedule for outcome in chosen.values()]
    for bound_s, outcome in frontier.points:
        schedule, estimates = outcome.schedule, outcome.estimates
        is_marked = schedule in marked
        table.add_row(
            ">" if is_marked else "",
            seconds(bound_s),
            _NAMES[outcome.policy.value],
            _encode_batch(outcome),
            outcome.control_text,
            f"{schedule.decode_batch:.1f}",
            f"{estimates.throughput:.4g}",
            f"{outcome.tokens_per_s:.4g}",
            seconds(float(estimates.latency_s)),
            seconds(float(estimates.first_token_s)),
            seconds(float(estimates.token_s)),
            *([stages_of(schedule)] if has_stages else []),
            style="bold green" if is_marked else None,
        )
    return table


def neighbours_table(
    bounds: LatencyBounds, chosen: Outcome, neighbours: Mapping[str, Outcome]
) -> Table:
    """Return the schedule that is chosen for bounds, and one row for each neighbour."""
    from rich import box
    from rich.table import Table

    title = f"chosen for {_bounds_of(bounds)}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("schedule")
    for name in (
        "B_E",
        chosen.control_name,
        "answers/s",
        "",
        "p99 answer",
        "1st token",
        "a token",
    ):
        table.add_column(name, justify="right")
    table.add_column("")
    for name, outcome in {"chosen": chosen, **neighbours}.items():
        estimates = outcome.estimates
        change = float(estimates.throughput / chosen.estimates.throughput - 1)
        table.add_row(
            name,
            _encode_batch(outcome),
            str(outcome.control),
            f"{estimates.throughput:.4g}",
            "" if name == "chosen" else f"{change:+.1%}",
            seconds(float(estimates.latency_s)),
            seconds(float(estimates.first_token_s)),
            seconds(float(estimates.token_s)),
            remark(bounds, outcome),
            style="bold green" if name == "chosen" else None,
        )
    return table


def remark(bounds: LatencyBounds, outcome: Outcome) -> str:
    """Return why a schedule cannot be chosen for bounds, if it cannot."""
    if not outcome.estimates.fits:
        return "not possible: memory, slots or chunk"
    return "" if bounds.met(outcome.estimates) else "misses the bound"


def _encode_batch(outcome: Outcome) -> str:
    """Return B_E; continuous batching has none."""
    return "" if outcome.policy.value == "continuous" else str(outcome.schedule.encode_batch)


def stages_of(schedule: Schedule) -> str:
    """Return the stages as `--stages` takes them; WAA's groups as `--groups` does."""
    encode = [s for s in schedule.stages if s.num_encode_layers and not s.num_decode_layers]
    decode = [s for s in schedule.stages if s.num_decode_layers]
    groups = [
        _counted([f"{s.num_encode_layers}x{s.num_devices}" for s in encode]),
        _counted([f"{s.num_decode_layers}x{s.num_devices}" for s in decode]),
    ]
    return "/".join(group for group in groups if group)


def seconds(value: float) -> str:
    """Return seconds as text with three digits."""
    if not math.isfinite(value):
        return "none"
    if value < 0.1:
        return f"{1000 * value:.3g} ms"
    return f"{value:.3g} s" if value < 1000 else f"{value:.0f} s"


def summary(about: Mapping[str, Any]) -> str:
    """Return a line on the model, the devices, and the lengths."""
    return (
        f"{about['model']} on {about['devices']}; {about['lengths']}: prompts of "
        f"{about['mean_input_tokens']:.4g} tokens and answers of {about['mean_output_tokens']:.4g} "
        f"on average, 99th percentile {about['long_output_tokens']}"
    )


def _bounds_of(bounds: LatencyBounds) -> str:
    named = {
        "bound": bounds.latency_s,
        "1st token in": bounds.first_token_s,
        "a token in": bounds.token_s,
    }
    given = [f"{name} {seconds(bound_s)}" for name, bound_s in named.items() if bound_s != math.inf]
    return ", ".join(given) or "no bound"


def _counted(names: list[str]) -> str:
    runs = [(name, len(list(same))) for name, same in groupby(names)]
    return ",".join(name if num == 1 else f"{num}*{name}" for name, num in runs)
