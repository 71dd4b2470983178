"""The picture of a throughput-latency frontier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from jaxserve.planning.schedules.frontier import Frontier, ScheduleOutcome
from jaxserve.planning.schedules.schedule import AllocationPolicy
from jaxserve.report.picture import Picture
from jaxserve.report.style import BLUE, GREEN, INK, ORANGE, PINK, STYLE

# Colour and marker.
_STYLES = {
    AllocationPolicy.RRA: (BLUE, "o"),
    AllocationPolicy.WAA_C: (ORANGE, "s"),
    AllocationPolicy.WAA_M: (GREEN, "D"),
    AllocationPolicy.CONTINUOUS: (PINK, "^"),
}


def draw_frontier(
    frontier: Frontier, chosen: Mapping[float, ScheduleOutcome] | None = None, *, title: str = ""
) -> Picture:
    """Draw the highest throughput for each latency bound, over random schedules.

    Args:
      chosen: latency bound in seconds -> the schedule chosen for it; these are marked.
    """
    with rc_context(STYLE):
        return Picture(_drawn(frontier, chosen or {}, title))


def _drawn(frontier: Frontier, chosen: Mapping[float, ScheduleOutcome], title: str) -> Figure:
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    lowest_s, highest_s = _range_s(frontier, chosen)
    _draw_drawn(axes, frontier, highest_s)
    _draw_stairs(axes, frontier, highest_s)
    top = max(float(outcome.estimates.throughput) for _, outcome in frontier.points)
    axes.set_xscale("log")
    # Labels are stacked above the highest step.
    axes.set(xlim=(lowest_s / 1.25, highest_s), ylim=(0, (1.1 + 0.14 * len(chosen)) * top))
    for i, (bound_s, outcome) in enumerate(sorted(chosen.items())):
        _draw_chosen(axes, bound_s, outcome, at=0.98 - 0.11 * i)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    is_narrow = highest_s / lowest_s < 100
    few = FuncFormatter(lambda x, _: f"{x:g}" if str(f"{x:e}")[0] in "235" else "")
    axes.xaxis.set_minor_formatter(few if is_narrow else NullFormatter())
    axes.set_xlabel("latency of an answer of the 99th-percentile length (s)")
    axes.set_ylabel("answers per second")
    if title:
        axes.set_title(title, fontsize=11)
    axes.legend(loc="lower right", frameon=True, facecolor="white", edgecolor="none")
    return figure


def _range_s(frontier: Frontier, chosen: Mapping[float, ScheduleOutcome]) -> tuple[float, float]:
    bounds = [bound_s for bound_s in chosen if np.isfinite(bound_s)]
    ends = [float(outcome.estimates.latency_s) for _, outcome in frontier.points]
    return min(frontier.lowest_s, *ends), 1.6 * max(*ends, *bounds, 0.0)


def _draw_drawn(axes: Any, frontier: Frontier, highest_s: float) -> None:
    shown = frontier.drawn[frontier.drawn[:, 1] <= highest_s]
    axes.scatter(
        shown[:, 1], shown[:, 0], s=8, color="0.80", linewidths=0, label="other schedules", zorder=1
    )


def _draw_stairs(axes: Any, frontier: Frontier, highest_s: float) -> None:
    latencies = [float(outcome.estimates.latency_s) for _, outcome in frontier.points]
    answers = [float(outcome.estimates.throughput) for _, outcome in frontier.points]
    axes.step(
        [*latencies, highest_s],
        [*answers, answers[-1]],
        where="post",
        color=INK,
        linewidth=1.2,
        alpha=0.7,
        zorder=2,
    )
    axes.fill_between(
        [*latencies, highest_s],
        [*answers, answers[-1]],
        step="post",
        color=BLUE,
        alpha=0.06,
        linewidth=0,
        zorder=0,
    )
    for policy, (colour, marker) in _STYLES.items():
        own = [i for i, (_, outcome) in enumerate(frontier.points) if outcome.policy is policy]
        if own:
            axes.plot(
                [latencies[i] for i in own],
                [answers[i] for i in own],
                marker,
                color=colour,
                markersize=5.5,
                zorder=3,
                label=f"best, {policy.label}",
            )


def _draw_chosen(axes: Any, bound_s: float, outcome: ScheduleOutcome, *, at: float) -> None:
    latency_s = float(outcome.estimates.latency_s)
    answers = float(outcome.estimates.throughput)
    colour, marker = _STYLES[outcome.policy]
    where_s = bound_s if np.isfinite(bound_s) else latency_s
    axes.axvline(where_s, color=colour, linestyle=(0, (4, 3)), linewidth=1, zorder=1)
    axes.plot(
        latency_s,
        answers,
        marker,
        markersize=13,
        markerfacecolor="none",
        markeredgecolor=colour,
        markeredgewidth=2,
        zorder=4,
    )
    batch = f"$B_E$ {outcome.schedule.encode_batch}, ${outcome.control_name}$ {outcome.control}"
    if outcome.policy is AllocationPolicy.CONTINUOUS:
        batch = f"at most {outcome.control}"
    bound = f"bound {bound_s:.3g} s" if np.isfinite(bound_s) else "no bound"
    low, high = axes.get_xlim()
    is_left = np.log(where_s / low) < 0.5 * np.log(high / low)
    axes.annotate(
        f"{bound}: {outcome.policy.label}, {batch}\n{answers:.3g} answers/s, {latency_s:.3g} s",
        (where_s, at),
        (6 if is_left else -6, 0),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        ha="left" if is_left else "right",
        va="top",
        fontsize=9,
        color=colour,
        zorder=5,
    )
