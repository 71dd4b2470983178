"""Figures 3.12, 3.13, 3.15 and 3.16 of the Pensieve thesis: a plot a panel."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.figures import style
from benchmarks.figures.results import Result

# Each line of a plot has its own colour here.
COLOURS = {
    "vllm_like": style.INK,
    "s3_oracle": "#009E73",
    "pensieve_device_only": "#C0619A",
    "pensieve_lru": "#A67C00",
    "pensieve": "#D55E00",
    "auto": style.OURS,
}
_COLUMNS = 2


def chart(result: Result) -> Figure:
    """Draw normalised latency over throughput, a plot for each set of conversations."""
    sets = [s for s, _ in result.items("sets")]
    num_rows = -(-len(sets) // _COLUMNS)
    figure = style.canvas(8, 0.4 + 2.3 * num_rows)
    plots = figure.subplots(num_rows, _COLUMNS, squeeze=False).ravel()
    bound = result.number("arguments", "bound")
    lines = {}
    for axes, s in zip(plots, sets, strict=False):
        for policy, _ in result.items("sets", s, "policies"):
            at = ("sets", s, "policies", policy, "points")
            points = [(*at, i) for i, _ in result.items(*at)]
            served = [result.number(*point, "requests_per_s") for point in points]
            p90 = [result.number(*point, "normalised_latency_s", "p90") for point in points]
            (lines[policy],) = axes.plot(served, p90, color=COLOURS.get(policy), marker="o")
        axes.axhline(bound, color=style.INK, linestyle="--", linewidth=1)
        axes.set(ylim=(0, 1.5 * bound), title=_title(result, s))
    for axes in plots[len(sets) :]:
        axes.set_axis_off()
    figure.supxlabel("requests served a second", fontsize=9)
    figure.supylabel("90th percentile of latency over output tokens, s", fontsize=9)
    names = [style.name(policy) for policy in lines]
    figure.legend(lines.values(), names, loc="outside upper left", ncols=len(names), frameon=False)
    return figure


def _title(result: Result, s: int) -> str:
    each = result.get("sets", s)
    return (
        f"{each['figure']}: {each['model']}, {each['min_rounds']} rounds or more, "
        f"{each['reaction_s']:g} s"
    )
