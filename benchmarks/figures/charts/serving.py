"""A result into its pictures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from benchmarks.figures import flover_charts, pensieve, style
from benchmarks.figures.results import Result, bound_name

# A table says it all.
_TABLES_ONLY = (
    *("predictor", "probe", "s3", "scattered", "restore", "loading", "sharding", "gpu_check"),
)


def charts(result: Result) -> dict[str, Callable[[Result], Figure]]:
    """What draws each figure, by its file name without ending; none where a table says it all.

    They draw inside `matplotlib.rc_context(style.RC)`, and raise ResultFileError where the file
    lacks what its kind has.
    """
    stem = result.path.stem
    if result.kind == "flover":
        return {f"{stem}_{number}": chart for number, chart in flover_charts.BY_NUMBER.items()}
    if result.kind == "offline":
        return {f"{stem}_peers": _peers} if result.has_peers else {}
    if result.kind in _TABLES_ONLY:
        return {}
    if result.kind == "pensieve":
        return {stem: pensieve.chart}
    if result.kind == "conversations":
        if "," not in result.get("arguments")["rates"]:
            return {}  # no lines to draw through one rate
        return {
            f"{stem}_{number + 1}": partial(_conversations, number)
            for number, _ in result.items("sets")
        }
    drawn = {stem: {"policies": _policies, "online": _online, "simulate": _simulate}[result.kind]}
    if result.kind == "policies" and result.get("arguments").get("predictor"):
        drawn[f"{stem}_split"] = _latency_split
    return drawn


def _peers(result: Result) -> Figure:
    """Engines that ran, the fastest on top, and the bound as a line."""
    rates = {
        name: result.number("compare", "engines", name, "output_tokens_per_s")
        for name, figures in result.items("compare", "engines")
        if not figures.get("error")
    }
    names = sorted(rates, key=lambda name: -rates[name])
    figure = style.canvas(7, 0.9 + 0.32 * len(names))
    axes = figure.subplots()
    values = [rates[name] for name in names]
    style.bars(axes, names, values, title="output tokens a second", form=".0f")
    bound = result.number("bound", "output_tokens_per_s")
    axes.axvline(bound, color=style.INK, linestyle="--", linewidth=1)
    axes.annotate(
        f"{bound_name(result)}: {bound:.0f}", (bound, 0), (0, -4),
        xycoords=("data", "axes fraction"), textcoords="offset points", ha="center", va="top",
    )  # fmt: skip
    return figure


def _policies(result: Result) -> Figure:
    names = [name for name, _ in result.items("policies")]
    rates = [result.number("policies", name, "output_tokens_per_s") for name in names]
    latencies = [result.number("policies", name, "latency_s", "p50") for name in names]
    figure = style.canvas(8, 0.6 + 0.32 * len(names))
    left, right = figure.subplots(1, 2, sharey=True)
    style.bars(left, names, rates, title="output tokens a second", form=".0f")
    style.bars(right, names, latencies, title="median latency, s", form=".1f")
    left.invert_yaxis()  # shared, and turned twice
    return figure


def _latency_split(result: Result) -> Figure:
    """Figure 6 of the S3 paper: where the seconds of a run go."""
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


def _online(result: Result) -> Figure:
    return _load_curves(result, ("policies",))


def _conversations(number: int, result: Result) -> Figure:
    """Figures 3.12, 3.15 and 3.16 of the Pensieve thesis, a set of conversations each."""
    figure = _load_curves(result, ("sets", number, "policies"))
    rounds = result.number("sets", number, "min_rounds")
    reaction_s = result.number("sets", number, "reaction_s")
    figure.suptitle(
        f"{rounds:.0f} rounds or more, back after {reaction_s:g} s",
        x=0.01, ha="left", fontsize=9, color=style.INK,
    )  # fmt: skip
    return figure


def _load_curves(result: Result, at: tuple[str | int, ...]) -> Figure:
    """Latency over what was served, a line a policy."""
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


def _simulate(result: Result) -> Figure:
    figure = style.canvas(4, 4)
    axes: Any = figure.subplots()
    runs = [i for i, _ in result.items("runs")]
    measured = [result.number("runs", i, "measured", "output_tokens_per_s") for i in runs]
    predicted = [result.number("runs", i, "predicted", "output_tokens_per_s") for i in runs]
    axes.axline((0, 0), slope=1, color=style.INK, linewidth=1, linestyle="--")
    axes.scatter(measured, predicted, color=style.OURS, s=18, zorder=3)
    most = 1.08 * max([*measured, *predicted, 1.0])
    axes.set(xlim=(0, most), ylim=(0, most), xlabel="measured")
    axes.set_title("output tokens a second, predicted")
    axes.set_aspect("equal")
    return figure
