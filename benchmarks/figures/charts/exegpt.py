"""Figures 6, 7, 8 and 11 of the ExeGPT paper: grouped bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from benchmarks.figures import style
from benchmarks.figures.results import Result

COLOURS = {
    "fastertransformer": style.INK,
    "deepspeed": "#A67C00",
    "orca": "#009E73",
    "vllm": "#C0619A",
    "rra": style.OURS,
    "waa": "#D55E00",
    "continuous": "#56B4E9",
}
_COLUMNS = 3
_GAP = 0.2


def systems(figure: int, result: Result) -> Figure:
    """Draw throughput by bound: a plot a model and task, a group a bound, a bar a system."""
    names = tuple(COLOURS) if figure == 7 else ("fastertransformer", "rra", "waa", "continuous")
    points = result.get("figure_7" if figure == 7 else "points")
    chosen = [point for point in points if figure == 7 or point["figure"] == figure]
    groups: dict[str, list[dict[str, Any]]] = {}
    for point in chosen:
        title = f"{point['model']}, {point['num_devices']} {point['cluster']}, {point['task']}"
        groups.setdefault(title, []).append(point)
    num_rows = max(1, -(-len(groups) // _COLUMNS))
    canvas = style.canvas(9, 0.8 + 1.9 * num_rows)
    plots = canvas.subplots(num_rows, _COLUMNS, squeeze=False).ravel()
    for axes, (title, own) in zip(plots, groups.items(), strict=False):
        values = {name: [p["per_s_of"].get(name) for p in own] for name in names}
        _grouped(axes, [_bound(p) for p in own], values)
        axes.set_title(title)
    for axes in plots[len(groups) :]:
        axes.set_axis_off()
    canvas.supxlabel("latency bound, s", fontsize=9)
    canvas.supylabel("answers a second", fontsize=9)
    _legend(canvas, plots[0], names)
    return canvas


def changed(result: Result) -> Figure:
    """Draw figure 11 of WAA: throughput left alone and planned anew, and the p99 latency."""
    rows = [row for _, row in result.items("figure_11") if row["policy"] == "waa"]
    kinds = list(dict.fromkeys(row["changed"] for row in rows))
    canvas = style.canvas(9, 2.9)
    plots = canvas.subplots(1, max(1, len(kinds)), squeeze=False).ravel()
    for axes, kind in zip(plots, kinds, strict=False):
        own = [row for row in rows if row["changed"] == kind]
        values = {
            "schedule left alone": [row["left_alone_per_s"] for row in own],
            "planned anew": [row["planned_per_s"] for row in own],
        }
        colours = {"schedule left alone": style.OURS, "planned anew": "#D55E00"}
        _grouped(axes, [f"{row['by']:g}" for row in own], values, colours)
        latency = axes.twinx()
        bound_s = own[0]["bound_s"]
        line = [row["left_alone_latency_s"] / bound_s for row in own]
        latency.plot(range(len(own)), line, color=style.INK, marker="o", label="p99 over bound")
        latency.set_ylim(0, 1.4)
        axes.set_title(f"{kind} changed; line: p99 over bound")
    canvas.supylabel("answers a second", fontsize=9)
    _legend(canvas, plots[0], ("schedule left alone", "planned anew"))
    return canvas


def _grouped(
    axes: Any,
    labels: Sequence[str],
    values: dict[str, list[float | None]],
    colours: dict[str, str] = COLOURS,
) -> None:
    """Draw a group of bars a label; an x where a system does not keep it."""
    width = (1 - _GAP) / len(values)
    for i, (name, heights) in enumerate(values.items()):
        places = [x + (i - (len(values) - 1) / 2) * width for x in range(len(labels))]
        drawn = [height or 0.0 for height in heights]
        axes.bar(places, drawn, width, color=colours[name], label=style.name(name))
        for x, height in zip(places, heights, strict=True):
            if not height:
                axes.annotate("x", (x, 0.0), ha="center", color=colours[name])
    axes.set_xticks(range(len(labels)), labels)
    axes.tick_params(axis="x", length=0)


def _legend(canvas: Figure, axes: Any, names: Sequence[str]) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        canvas.legend(handles, labels, loc="outside upper left", ncols=len(names), frameon=False)


def _bound(point: dict[str, Any]) -> str:
    return "none" if point["bound_s"] is None else f"{point['bound_s']:.1f}"


BY_NUMBER: dict[int, Callable[[Result], Figure]] = {
    6: partial(systems, 6),
    7: partial(systems, 7),
    8: partial(systems, 8),
    11: changed,
}
