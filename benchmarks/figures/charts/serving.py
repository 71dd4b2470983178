"""Charts of throughput and latency: peers, policies, load, conversations, simulations."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.figures import style
from benchmarks.figures.results import Result, bound_name, is_quantised


def peers(result: Result) -> Figure:
    """Draw the engines that ran, the fastest on top, and the bound as a line."""
    rates = {
        name: result.spread(("compare", "engines", name), "output_tokens_per_s")
        for name, figures in result.items("compare", "engines")
        if not figures.get("error")
    }
    names = sorted(rates, key=lambda name: -rates[name].median)
    figure = style.canvas(7, 0.9 + 0.32 * len(names))
    axes = figure.subplots()
    values = [rates[name] for name in names]
    style.bars(axes, names, values, title="output tokens a second", form=".0f")
    if is_quantised(result):  # The bound is that of weights in the model's dtype.
        return figure
    bound = result.number("bound", "output_tokens_per_s")
    axes.axvline(bound, color=style.INK, linestyle="--", linewidth=1)
    axes.annotate(
        f"{bound_name(result)}: {bound:.0f}", (bound, 0), (0, -4),
        xycoords=("data", "axes fraction"), textcoords="offset points", ha="center", va="top",
    )  # fmt: skip
    return figure


def policies(result: Result) -> Figure:
    """Draw throughput and, where it was measured, median latency of every policy."""
    names = [name for name, _ in result.items("policies")]
    rates = [result.spread(("policies", name), "output_tokens_per_s") for name in names]
    latencies = [
        found
        for name in names
        if (found := result.optional_spread(("policies", name), "latency_s", "p50")) is not None
    ]
    figure = style.canvas(8 if latencies else 5, 0.6 + 0.32 * len(names))
    if not latencies:
        axes = figure.subplots()
        style.bars(axes, names, rates, title="output tokens a second", form=".0f")
        return figure
    left, right = figure.subplots(1, 2, sharey=True)
    style.bars(left, names, rates, title="output tokens a second", form=".0f")
    style.bars(right, names, latencies, title="median latency, s", form=".1f")
    left.invert_yaxis()  # shared, and turned twice
    return figure


def has_latency_split(result: Result) -> bool:
    """Return whether the runs used a predictor and have the parts of their time."""
    if not result.get("arguments").get("predictor"):
        return False
    return all("latency_split_s" in figures for _, figures in result.items("policies"))


def latency_split(result: Result) -> Figure:
    """Draw figure 6 of the S3 paper: the parts of the seconds of a run."""
    names = [name for name, _ in result.items("policies")]
    figure = style.canvas(7, 0.8 + 0.32 * len(names))
    axes = figure.subplots()
    before = [0.0] * len(names)
    for part, colour in style.PARTS.items():
        own = [result.number("policies", name, "latency_split_s", part) for name in names]
        axes.barh([style.name(name) for name in names], own, 0.62, before, color=colour, label=part)
        before = [begin + length for begin, length in zip(before, own, strict=True)]
    axes.invert_yaxis()
    axes.set_title("seconds of the run")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.legend(frameon=False, ncols=len(style.PARTS), loc="upper left", bbox_to_anchor=(0, -0.1))
    return figure


def online(result: Result) -> Figure:
    """Draw latency over the requests served, a line a policy."""
    return _load_curves(result, ("policies",))


def conversations(number: int, result: Result) -> Figure:
    """Draw a set of conversations as figures 3.12, 3.15 and 3.16 of the Pensieve thesis."""
    figure = _load_curves(result, ("sets", number, "policies"))
    rounds = result.number("sets", number, "min_rounds")
    reaction_s = result.number("sets", number, "reaction_s")
    figure.suptitle(
        f"{rounds:.0f} rounds or more, back after {reaction_s:g} s",
        x=0.01, ha="left", fontsize=9, color=style.INK,
    )  # fmt: skip
    return figure


def _load_curves(result: Result, at: tuple[str | int, ...]) -> Figure:
    """Draw latency over the requests served, a line a policy."""
    figure = style.canvas(7, 3.6)
    axes = figure.subplots()
    for name, _ in result.items(*at):
        points = [(*at, name, "points", i) for i, _ in result.items(*at, name, "points")]
        served = [result.number(*point, "requests_per_s") for point in points]
        p90 = [result.number(*point, "normalised_latency_s", "p90") for point in points]
        style.line(axes, name, served, p90)
    axes.set(xlabel="requests served a second", ylim=(0, None), xlim=(0, None))
    axes.set_title("90th percentile of latency over output tokens, s")
    style.label_lines(axes)
    return figure


def simulate(result: Result) -> Figure:
    """Draw predicted over measured throughput, a point a policy."""
    figure = style.canvas(4, 4)
    axes: Any = figure.subplots()
    places = [("policies", i) for i, _ in result.items("policies")]
    measured, predicted = (
        [result.spread(at, kind, "output_tokens_per_s").median for at in places]
        for kind in ("measured", "predicted")
    )
    axes.axline((0, 0), slope=1, color=style.INK, linewidth=1, linestyle="--")
    axes.scatter(measured, predicted, color=style.OURS, s=18, zorder=3)
    most = 1.08 * max([*measured, *predicted, 1.0])
    axes.set(xlim=(0, most), ylim=(0, most), xlabel="measured")
    axes.set_title("output tokens a second, predicted")
    axes.set_aspect("equal")
    return figure
