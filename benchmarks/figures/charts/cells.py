"""Figures 2.7, 2.8, 2.13, 2.14 and 2.15 of the BatchMaker thesis: p90 latency over throughput."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.figures import style
from benchmarks.figures.results import Result

COLOURS = {
    "batchmaker": style.OURS,
    "padding_1": "#C0619A",
    "padding_10": "#D55E00",
    "padding_40": "#A67C00",
    "merged_by_agenda": "#D55E00",
    "merged_by_depth": "#A67C00",
    "lazy_batching": "#009E73",
    "identical_graphs": style.INK,
    "one_at_a_time": style.INK,
}
# Latencies above this many times the least one are beyond the plot.
_HIGHEST = 40.0
_COLUMNS = 2


def has_lines(result: Result) -> bool:
    """Return whether there are sweeps, and not other systems alone."""
    return bool(result.get("points"))


def chart(result: Result) -> Figure:
    """Draw p90 latency over served requests a second, a plot for each workload."""
    found = [(point["application"], point["how"]) for _, point in result.items("points")]
    workloads = list(dict.fromkeys(found))
    num_rows = -(-len(workloads) // _COLUMNS)
    figure = style.canvas(8, 0.6 + 2.4 * num_rows)
    plots = figure.subplots(num_rows, _COLUMNS, squeeze=False).ravel()
    lines = {}
    for axes, workload in zip(plots, workloads, strict=False):
        lines |= _plot(axes, result, workload)
    for axes in plots[len(workloads) :]:
        axes.set_axis_off()
    figure.supxlabel("requests served a second", fontsize=9)
    figure.supylabel("90th percentile of latency, ms", fontsize=9)
    names = [style.name(policy) for policy in lines]
    figure.legend(lines.values(), names, loc="outside upper left", ncols=4, frameon=False)
    return figure


def _plot(axes, result: Result, workload: tuple[str, str]) -> dict:
    points = [
        (point["policy"], ("points", index))
        for index, point in result.items("points")
        if (point["application"], point["how"]) == workload
    ]
    lines, least = {}, float("inf")
    for policy in dict.fromkeys(name for name, _ in points):
        own = [at for name, at in points if name == policy and result.get(*at, "rate") is not None]
        served = [result.number(*at, "requests_per_s") for at in own]
        p90 = [1000 * result.number(*at, "latency_s", "p90") for at in own]
        least = min(least, *p90)
        (lines[policy],) = axes.plot(served, p90, color=COLOURS.get(policy), marker="o")
    axes.set(ylim=(0, _HIGHEST * least), title=", ".join(workload))
    return lines
