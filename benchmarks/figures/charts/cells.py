"""Figures 2.7 to 2.15 of the BatchMaker thesis: latency over throughput, queueing and computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

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
_WIDTHS = ("batchmaker", "padding_1", "padding_10", "padding_40")
# Number of the figure -> its workloads, and the policies that it shows; none for all.
_LINES: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {
    7: (("lstm", "lstm_batch_64"), ("batchmaker", "padding_10", "lazy_batching")),
    8: (("lstm",), _WIDTHS),
    11: (("lstm_24_words", "lstm_to_50_words", "lstm_to_100_words"), _WIDTHS),
    13: (("seq2seq", "seq2seq_2_devices", "seq2seq_4_devices"), ()),
    14: (("treelstm", "treelstm_batch_64"), ()),
    15: (("identical_trees", "identical_trees_batch_64"), ()),
}
_PARTS = {"queueing_s": "queueing, ms", "computing_s": "computing, ms"}
# The load of figure 2.9: 5,000 requests/s of the 20,000 that BatchMaker serves at most.
_LOW_LOAD = 0.25
_LEAST_MS = 0.01  # of a logarithmic axis
# Latencies above this many times the least one are beyond the plot.
_HIGHEST = 40.0
_COLUMNS = 2


def charts(result: Result) -> dict[int, Callable[[Result], Figure]]:
    """Return what draws each figure of which the result has a workload, by its number."""
    found: dict[int, Callable[[Result], Figure]] = {
        number: partial(_lines, number) for number in _LINES if _workloads(result, number)
    }
    if _sweeps(result, ("lstm",)):
        found[9] = _parts
    return dict(sorted(found.items()))


def _workloads(result: Result, number: int) -> list[tuple[str, str]]:
    return _sweeps(result, _LINES[number][0])


def _sweeps(result: Result, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the workloads with these names, and how each was run."""
    points = [point for _, point in result.items("points")]
    found = dict.fromkeys((point["application"], point["how"]) for point in points)
    return [workload for workload in found if workload[0] in names]


def _lines(number: int, result: Result) -> Figure:
    """Draw p90 latency over served requests a second, a plot for each workload."""
    workloads = _workloads(result, number)
    num_rows = -(-len(workloads) // _COLUMNS)
    figure = style.canvas(8, 0.6 + 2.4 * num_rows)
    plots = figure.subplots(num_rows, _COLUMNS, squeeze=False).ravel()
    lines = {}
    for axes, workload in zip(plots, workloads, strict=False):
        lines |= _plot(axes, result, workload, _LINES[number][1])
    for axes in plots[len(workloads) :]:
        axes.set_axis_off()
    figure.supxlabel("requests served a second", fontsize=9)
    figure.supylabel("90th percentile of latency, ms", fontsize=9)
    _name(figure, lines)
    return figure


def _plot(axes, result: Result, workload: tuple[str, str], policies: Sequence[str]) -> dict:
    points = [(policy, at) for policy, at in _points(result, workload) if _rate(result, at)]
    lines, least = {}, float("inf")
    for policy in dict.fromkeys(name for name, _ in points):
        if policies and policy not in policies:
            continue
        own = [at for name, at in points if name == policy]
        served = [result.number(*at, "requests_per_s") for at in own]
        p90 = [1000 * result.number(*at, "latency_s", "p90") for at in own]
        least = min(least, *p90)
        (lines[policy],) = axes.plot(served, p90, color=COLOURS.get(policy), marker="o")
    if lines:
        axes.set(ylim=(0, _HIGHEST * least))
    axes.set_title(", ".join(map(style.name, workload)))
    return lines


def _parts(result: Result) -> Figure:
    """Draw the distributions of queueing and of computing at low load, as in figure 2.9."""
    workloads = _sweeps(result, ("lstm",))
    figure = style.canvas(8, 0.6 + 2.4 * len(workloads))
    plots = figure.subplots(len(workloads), len(_PARTS), squeeze=False)
    lines = {}
    for row, workload in zip(plots, workloads, strict=True):
        points = _at_low_load(result, workload)
        for axes, (part, label) in zip(row, _PARTS.items(), strict=True):
            for policy, at in points:
                if policy in _LINES[7][1]:
                    run = (*at, "runs", 0) if "runs" in result.get(*at) else at
                    times = [1000 * s for s in result.get(*run, "quantiles", part)]
                    shares = [100 * i / (len(times) - 1) for i in range(len(times))]
                    (lines[policy],) = axes.plot(
                        [max(each, _LEAST_MS) for each in times], shares, color=COLOURS[policy]
                    )
            axes.set(xscale="log", xlabel=label)
            rate = result.number(*points[0][1], "rate") if points else 0.0
            axes.set_title(f"{', '.join(map(style.name, workload))}, {rate:.0f} requests/s")
    figure.supylabel("requests, %", fontsize=9)
    _name(figure, lines)
    return figure


def _at_low_load(result: Result, workload: tuple[str, str]) -> list[tuple[str, tuple[Any, ...]]]:
    """Return every policy's point at the rate next to a quarter of BatchMaker's peak."""
    points = _points(result, workload)
    served = [
        result.number(*at, "requests_per_s") for policy, at in points if policy == "batchmaker"
    ]
    rates = {rate for _, at in points if (rate := _rate(result, at))}
    if not served or not rates:
        return []
    wanted = min(rates, key=lambda rate: abs(rate - _LOW_LOAD * max(served)))
    return [(policy, at) for policy, at in points if _rate(result, at) == wanted]


def _points(result: Result, workload: tuple[str, str]) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the policy and the place of each point of a workload."""
    return [
        (point["policy"], ("points", index))
        for index, point in result.items("points")
        if (point["application"], point["how"]) == workload
    ]


def _rate(result: Result, at: tuple[Any, ...]) -> float | None:
    """Return the rate of arrivals; None for all requests at once."""
    return result.optional(*at, "rate")


def _name(figure: Figure, lines: dict) -> None:
    names = [style.name(policy) for policy in lines]
    figure.legend(lines.values(), names, loc="outside upper left", ncols=4, frameon=False)
