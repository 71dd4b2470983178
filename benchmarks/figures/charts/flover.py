"""Figures 4 to 7 of the Flover paper, from our own measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.figures import style
from benchmarks.figures.results import Result


def runs_of(result: Result, part: str) -> dict[str, list[int]]:
    """Return the positions of each policy's points in one part of the result."""
    positions: dict[str, list[int]] = {}
    for i, _ in result.items(part):
        positions.setdefault(result.get(part, i, "policy"), []).append(i)
    return positions


def _constant(result: Result) -> Figure:
    figure = style.canvas(10, 3.2)
    total, rate, latency = figure.subplots(1, 3)
    alone_s = result.number("alone_s")
    for policy, runs in runs_of(result, "constant").items():
        counts = [result.number("constant", i, "num_requests") for i in runs]
        mean_s = [result.number("constant", i, "latency_s", "mean") for i in runs]
        style.line(total, policy, counts, [result.number("constant", i, "wall_s") for i in runs])
        tokens = [result.number("constant", i, "output_tokens_per_s") for i in runs]
        style.line(rate, policy, counts, tokens)
        style.line(latency, policy, counts, [each / alone_s for each in mean_s])
    total.set_title("total time, s")
    rate.set_title("output tokens a second")
    latency.set_title("mean latency over that of one alone")
    for axes in (total, rate, latency):
        axes.set(xlabel="requests", ylim=(0, None))
        _log2(axes, [result.number("constant", i, "num_requests") for i, _ in
                     result.items("constant")])  # fmt: skip
    style.label_lines(latency)
    return figure


def _poisson(result: Result) -> Figure:
    figure = style.canvas(6.5, 3.4)
    axes = figure.subplots()
    alone_s = result.number("alone_s")
    shares: list[float] = []
    for policy, runs in runs_of(result, "poisson").items():
        shares = [result.number("poisson", i, "mean_interval_s") / alone_s for i in runs]
        style.line(axes, policy, shares, [result.number("poisson", i, "wall_s") for i in runs])
    axes.set_xscale("log")
    axes.set_xticks(shares, [f"{share:.2g}" for share in shares])
    axes.minorticks_off()
    axes.set(xlabel="mean interval between requests over the time of one alone", ylim=(0, None))
    axes.set_title("total time, s")
    style.label_lines(axes)
    return figure


def _uniform(result: Result) -> Figure:
    figure = style.canvas(6.5, 3.4)
    axes = figure.subplots()
    longest: list[float] = []
    for policy, runs in runs_of(result, "uniform").items():
        longest = [result.number("uniform", i, "longest") for i in runs]
        style.line(axes, policy, longest, [result.number("uniform", i, "wall_s") for i in runs])
    axes.set_xticks(longest)
    axes.set(xlabel="tokens of the longest answer", ylim=(0, None))
    axes.set_title("total time, s")
    style.label_lines(axes)
    return figure


def _progress(result: Result) -> Figure:
    """Draw cumulative tokens with the most requests, and for the other windows."""
    figure = style.canvas(7, 3.6)
    axes: Any = figure.subplots()
    for part in ("constant", "windows"):
        for policy, runs in runs_of(result, part).items():
            kept = [i for i in runs if "requests" in result.get(part, i)]
            if kept:
                times, tokens = _cumulative(result, part, kept[-1])
                style.line(axes, policy, times, tokens, marks=False)
    axes.set(xlabel="time, s", xlim=(0, None), ylim=(0, None))
    axes.set_title("output tokens so far")
    style.label_lines(axes, above=True)
    return figure


def _cumulative(result: Result, part: str, run: int) -> tuple[list[float], list[float]]:
    """Return times and counts of tokens; an answer's lie evenly from its first to its end."""
    times: list[float] = []
    for i, _ in result.items(part, run, "requests"):
        at = (part, run, "requests", i)
        count = int(result.number(*at, "num_output_tokens"))
        first_s, end_s = result.number(*at, "first_token_s"), result.number(*at, "finished_s")
        times += [first_s + (end_s - first_s) * k / max(1, count - 1) for k in range(count)]
    times.sort()
    thinned = range(0, len(times), max(1, len(times) // 100))
    return [0.0, *(times[i] for i in thinned)], [0.0, *(i + 1.0 for i in thinned)]


def _log2(axes: Any, values: Sequence[float]) -> None:
    ticks = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


BY_NUMBER = {4: _constant, 5: _poisson, 6: _uniform, 7: _progress}
