"""Charts of results in one style: no background, ink for light and dark pages."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.common.repeats import Spread
from benchmarks.figures.render import name
from benchmarks.figures.results import Place, by_policy, is_quantised
from jaxserve.report.style import BLUE, GREEN, INK, OCHRE, ORANGE, PINK, SKY, STYLE

COLOURS = {
    "jaxserve": BLUE,
    "auto": BLUE,
    "vllm_like": BLUE,
    "flover": ORANGE,
    "flover_without_shuffle": ORANGE,
    "orca": GREEN,
    "fastertransformer": PINK,
    "triton_window": OCHRE,
    "concurrent_instances": INK,
    "oracle": SKY,
}
# Parts of a run's seconds, as in figure 6 of the S3 paper.
PARTS = {"generation": BLUE, "penalty": ORANGE, "overhead": OCHRE}
MARKERS = {
    "flover": "o",
    "orca": "s",
    "vllm_like": "D",
    "fastertransformer": "^",
    "triton_window": "v",
    "concurrent_instances": "X",
}
_RC = STYLE | {
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.facecolor": "none",
    # Text stays text, and the same results give the same file.
    "svg.fonttype": "none",
    "svg.hashsalt": "jaxserve",
}
_LABEL_PT = 11.0
_LETTER_PT = 5.2
_P90 = "90th percentile of latency over output tokens, s"
_SERVED = "requests served a second"


def canvas(width: float, height: float) -> Figure:
    """Return an empty figure, sizes in inches; for use within `svg`."""
    return Figure(figsize=(width, height), layout="constrained")


def grid(width: float, height: float, plots: int, columns: int, row: float) -> tuple[Figure, Any]:
    """Return a figure with rows of plots, each `row` inches high; `fill` uses its axes."""
    num_rows = max(1, -(-plots // columns))
    figure = canvas(width, height + row * num_rows)
    return figure, figure.subplots(num_rows, columns, squeeze=False).ravel()


def fill(plots: Sequence[Any], contents: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    """Return each content with its axes; the axes that are left over are hidden."""
    for axes in plots[len(contents) :]:
        axes.set_axis_off()
    return zip(plots, contents, strict=False)


def line(axes: Any, policy: str, x: Sequence[float], y: Sequence[float], *, marks: bool = True):
    """Draw a policy's line in its own colour and with its own marker."""
    dashes = "--" if policy == "flover_without_shuffle" else "-"
    marker = MARKERS.get(policy, "o") if marks else None
    axes.plot(x, y, dashes, color=COLOURS.get(policy, SKY), marker=marker, label=name(policy))


def label_lines(axes: Any, *, above: bool = False) -> None:
    """Write every line's name right of its end, or above it; higher where names would overlap."""
    axes.figure.draw_without_rendering()
    points_a_pixel = 72 / axes.figure.dpi
    ends = []
    for drawn in axes.get_lines():
        end = (drawn.get_xdata()[-1], drawn.get_ydata()[-1])
        x, y = axes.transData.transform(end) * points_a_pixel
        width = _LETTER_PT * len(drawn.get_label())
        left, bottom = (x - width / 2, y + 9) if above else (x + 7, y)
        ends.append((bottom, left, left + width, x, y, end, drawn))
    placed: list[tuple[float, float, float]] = []
    for bottom, left, right, x, y, end, drawn in sorted(ends, key=lambda item: item[:2]):
        for other, begin, stop in placed:
            if begin < right and left < stop and other - _LABEL_PT < bottom < other + _LABEL_PT:
                bottom = other + _LABEL_PT
        placed = sorted([*placed, (bottom, left, right)])
        axes.annotate(
            drawn.get_label(),
            end,
            (left - x, bottom - y),
            textcoords="offset points",
            va="center",
            color=drawn.get_color(),
            annotation_clip=False,
        )


def bars(axes: Any, names: Sequence[str], values: Sequence[Spread], *, title: str, form: str):
    """Draw horizontal bars of medians with their ranges, the first on top, values at the ends."""
    medians = [value.median for value in values]
    below = [value.median - value.low for value in values]
    above = [value.high - value.median for value in values]
    drawn = axes.barh(
        [name(each) for each in names],
        medians,
        color=[COLOURS.get(each, INK) for each in names],
        height=0.62,
        xerr=[below, above] if any(below) or any(above) else None,
        error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2},
    )
    axes.bar_label(drawn, labels=[format(median, form) for median in medians], padding=4)
    axes.invert_yaxis()
    axes.set_title(title)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    axes.set_xticks([])
    axes.margins(x=0.12)


def svg(draw: Callable[[], Figure], identifier: str) -> bytes:
    """Return the SVG of `draw`, with the identifier of the result in its metadata."""
    data = io.BytesIO()
    with matplotlib.rc_context(_RC):
        draw().savefig(data, format="svg", metadata={"Date": None, "Identifier": identifier})
    return data.getvalue()


# ---- engines and policies ----


def peers(result: Place) -> Figure:
    """Draw the engines that ran, the fastest on top, and the bound as a line."""
    rates = {
        str(own.at[-1]): own.spread("output_tokens_per_s")
        for own in result.each("compare.engines.*")
        if not own.get().get("error")
    }
    names = sorted(rates, key=lambda name: -rates[name].median)
    figure = canvas(7, 0.9 + 0.32 * len(names))
    axes = figure.subplots()
    bars(axes, names, [rates[name] for name in names], title="output tokens a second", form=".0f")
    if is_quantised(result):  # The bound is that of weights in the model's dtype.
        return figure
    bound = result.number("bound", "output_tokens_per_s")
    axes.axvline(bound, color=INK, linestyle="--", linewidth=1)
    axes.annotate(
        f"roofline: {bound:.0f}",
        (bound, 0),
        (0, -4),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="center",
        va="top",
    )
    return figure


def policies(result: Place) -> Figure:
    """Draw throughput and, where it was measured, median latency of every policy."""
    runs = result.each("policies.*")
    names = [str(run.at[-1]) for run in runs]
    rates = [run.spread("output_tokens_per_s") for run in runs]
    latencies = [found for run in runs if (found := run.optional_spread("latency_s", "p50"))]
    figure = canvas(8 if latencies else 5, 0.6 + 0.32 * len(names))
    plots = figure.subplots(1, 2 if latencies else 1, sharey=True, squeeze=False)[0]
    bars(plots[0], names, rates, title="output tokens a second", form=".0f")
    if latencies:
        bars(plots[1], names, latencies, title="median latency, s", form=".1f")
        plots[0].invert_yaxis()  # shared, and turned twice
    return figure


def latency_split(result: Place) -> Figure:
    """Draw figure 6 of the S3 paper: the parts of the seconds of a run."""
    runs = result.each("policies.*")
    names = [name(str(run.at[-1])) for run in runs]
    figure = canvas(7, 0.8 + 0.32 * len(names))
    axes = figure.subplots()
    before = [0.0] * len(names)
    for part, colour in PARTS.items():
        own = [run.number("latency_split_s", part) for run in runs]
        axes.barh(names, own, 0.62, before, color=colour, label=part)
        before = [begin + length for begin, length in zip(before, own, strict=True)]
    axes.invert_yaxis()
    axes.set_title("seconds of the run")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.legend(ncols=len(PARTS), loc="upper left", bbox_to_anchor=(0, -0.1))
    return figure


def _policy_charts(result: Place) -> dict[str, Chart]:
    has_split = all("latency_split_s" in figures for _, figures in result.items("policies"))
    predicts = result.get("arguments").get("predictor") and has_split
    return {"": policies, **({"_split": latency_split} if predicts else {})}


# ---- latency over load ----


def _curve(policy: Place) -> tuple[list[float], list[float]]:
    """Return the requests served a second, and p90 of latency, of a policy's points."""
    points = policy.each("points.*")
    served = [point.number("requests_per_s") for point in points]
    return served, [point.number("normalised_latency_s", "p90") for point in points]


def load_curves(result: Place) -> Figure:
    """Draw latency over the requests served, with one line for each policy."""
    figure = canvas(7, 3.6)
    axes = figure.subplots()
    for policy in result.each("policies.*"):
        line(axes, str(policy.at[-1]), *_curve(policy))
    axes.set(xlabel=_SERVED, ylim=(0, None), xlim=(0, None))
    axes.set_title(_P90)
    label_lines(axes)
    return figure


def conversations(number: int, result: Place) -> Figure:
    """Draw a set of conversations as figures 3.12, 3.15 and 3.16 of the Pensieve thesis."""
    own = result.inside("sets", number)
    figure = load_curves(own)
    rounds, reaction_s = own.number("min_rounds"), own.number("reaction_s")
    title = f"{rounds:.0f} rounds or more, back after {reaction_s:g} s"
    figure.suptitle(title, x=0.01, ha="left", fontsize=9, color=INK)
    return figure


def _conversation_charts(result: Place) -> dict[str, Chart]:
    if "," not in result.get("arguments")["rates"]:
        return {}  # one rate makes no line
    return {f"_{i + 1}": partial(conversations, i) for i, _ in result.items("sets")}


# Each line of a plot has its own colour here.
_THESIS_COLOURS = {
    "vllm_like": INK,
    "s3_oracle": GREEN,
    "pensieve_device_only": PINK,
    "pensieve_lru": OCHRE,
    "pensieve": ORANGE,
    "auto": BLUE,
}
_COLUMNS = 2


def _panels(result: Place) -> Figure:
    sets = result.each("sets.*")
    figure, plots = grid(8, 0.4, len(sets), _COLUMNS, 2.3)
    bound = result.number("arguments", "bound")
    lines = {}
    for axes, own in fill(plots, sets):
        for curve in own.each("policies.*"):
            policy = str(curve.at[-1])
            colour = _THESIS_COLOURS.get(policy)
            (lines[policy],) = axes.plot(*_curve(curve), color=colour, marker="o")
        axes.axhline(bound, color=INK, linestyle="--", linewidth=1)
        title = "{figure}: {model}, {min_rounds} rounds or more, {reaction_s:g} s"
        axes.set(ylim=(0, 1.5 * bound), title=title.format_map(own.get()))
    figure.supxlabel(_SERVED, fontsize=9)
    figure.supylabel(_P90, fontsize=9)
    return _with_legend(figure, lines)


def _with_legend(figure: Figure, lines: Mapping[str, Any], columns: int | None = None) -> Figure:
    names = [name(policy) for policy in lines]
    figure.legend(lines.values(), names, loc="outside upper left", ncols=columns or len(names))
    return figure


# ---- Flover's section VI ----


def _constant(result: Place) -> Figure:
    figure = canvas(10, 3.2)
    total, rate, latency = figure.subplots(1, 3)
    alone_s = result.number("alone_s")
    for policy, runs in by_policy(result, "constant").items():
        counts = [run.number("num_requests") for run in runs]
        mean_s = [run.number("latency_s", "mean") for run in runs]
        line(total, policy, counts, [run.number("wall_s") for run in runs])
        line(rate, policy, counts, [run.number("output_tokens_per_s") for run in runs])
        line(latency, policy, counts, [each / alone_s for each in mean_s])
    total.set_title("total time, s")
    rate.set_title("output tokens a second")
    latency.set_title("mean latency over that of one alone")
    ticks = sorted({run.number("num_requests") for run in result.each("constant.*")})
    for axes in (total, rate, latency):
        axes.set(xlabel="requests", ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    label_lines(latency)
    return figure


def _total_times(
    result: Place, part: str, field: str, unit: float = 1.0
) -> tuple[Figure, Any, list[float]]:
    """Draw the total times of a part over a field; return the figure, its axes, and the field."""
    figure = canvas(6.5, 3.4)
    axes = figure.subplots()
    places: list[float] = []
    for policy, runs in by_policy(result, part).items():
        places = [run.number(field) / unit for run in runs]
        line(axes, policy, places, [run.number("wall_s") for run in runs])
    return figure, axes, places


def _poisson(result: Place) -> Figure:
    alone_s = result.number("alone_s")
    figure, axes, shares = _total_times(result, "poisson", "mean_interval_s", alone_s)
    axes.set_xscale("log")
    axes.set_xticks(shares, [f"{share:.2g}" for share in shares])
    axes.minorticks_off()
    return _titled(figure, axes, "mean interval between requests over the time of one alone")


def _uniform(result: Place) -> Figure:
    figure, axes, longest = _total_times(result, "uniform", "longest")
    axes.set_xticks(longest)
    return _titled(figure, axes, "tokens of the longest answer")


def _titled(figure: Figure, axes: Any, label: str) -> Figure:
    axes.set(xlabel=label, ylim=(0, None))
    axes.set_title("total time, s")
    label_lines(axes)
    return figure


def _progress(result: Place) -> Figure:
    """Draw cumulative tokens with the most requests, and for the other windows."""
    figure = canvas(7, 3.6)
    axes: Any = figure.subplots()
    for part in ("constant", "windows"):
        for policy, runs in by_policy(result, part).items():
            kept = [run for run in runs if "requests" in run.get()]
            if kept:
                line(axes, policy, *_cumulative(kept[-1]), marks=False)
    axes.set(xlabel="time, s", xlim=(0, None), ylim=(0, None))
    axes.set_title("output tokens so far")
    label_lines(axes, above=True)
    return figure


def _cumulative(run: Place) -> tuple[list[float], list[float]]:
    """Return times and counts of tokens, evenly spaced between an answer's first and its end."""
    times: list[float] = []
    for request in run.each("requests.*"):
        count = int(request.number("num_output_tokens"))
        first_s, end_s = request.number("first_token_s"), request.number("finished_s")
        times += [first_s + (end_s - first_s) * k / max(1, count - 1) for k in range(count)]
    times.sort()
    thinned = range(0, len(times), max(1, len(times) // 100))
    return [0.0, *(times[i] for i in thinned)], [0.0, *(i + 1.0 for i in thinned)]


# ---- ExeGPT ----

_SYSTEM_COLOURS = {
    "fastertransformer": INK,
    "deepspeed": OCHRE,
    "orca": GREEN,
    "vllm": PINK,
    "rra": BLUE,
    "waa": ORANGE,
    "continuous": "#56B4E9",
}
_CHANGED_COLOURS = {"schedule left alone": BLUE, "planned anew": ORANGE}
_BAR_COLUMNS = 3
_GAP = 0.2


def _systems(figure: int, result: Place) -> Figure:
    """Draw throughput: a plot for each model and task, a group for each bound, a bar a system."""
    is_seventh = figure == 7
    names = ("fastertransformer", "rra", "waa", "continuous")
    names = tuple(_SYSTEM_COLOURS) if is_seventh else names
    groups: dict[str, list[dict[str, Any]]] = {}
    for point in result.get("figure_7" if is_seventh else "points"):
        if is_seventh or point["figure"] == figure:
            title = f"{point['model']}, {point['num_devices']} {point['cluster']}, {point['task']}"
            groups.setdefault(title, []).append(point)
    picture, plots = grid(9, 0.8, len(groups), _BAR_COLUMNS, 1.9)
    for axes, (title, own) in fill(plots, list(groups.items())):
        values = {name: [p["per_s_of"].get(name) for p in own] for name in names}
        bounds = ["none" if p["bound_s"] is None else f"{p['bound_s']:.1f}" for p in own]
        _grouped(axes, bounds, values, _SYSTEM_COLOURS)
        axes.set_title(title)
    picture.supxlabel("latency bound, s", fontsize=9)
    return _answers_a_second(picture, plots[0], len(names))


def _changed(result: Place) -> Figure:
    """Draw figure 11 of WAA: throughput without a change and planned anew, and the p99 latency."""
    rows = [row for _, row in result.items("figure_11") if row["policy"] == "waa"]
    kinds = list(dict.fromkeys(row["changed"] for row in rows))
    picture = canvas(9, 2.9)
    plots = picture.subplots(1, max(1, len(kinds)), squeeze=False).ravel()
    for axes, kind in zip(plots, kinds, strict=False):
        own = [row for row in rows if row["changed"] == kind]
        fields = zip(_CHANGED_COLOURS, ("left_alone_per_s", "planned_per_s"), strict=True)
        values = {label: [row[field] for row in own] for label, field in fields}
        _grouped(axes, [f"{row['by']:g}" for row in own], values, _CHANGED_COLOURS)
        latency = axes.twinx()
        over = [row["left_alone_latency_s"] / own[0]["bound_s"] for row in own]
        latency.plot(range(len(own)), over, color=INK, marker="o", label="p99 over bound")
        latency.set_ylim(0, 1.4)
        axes.set_title(f"{kind} changed; line: p99 over bound")
    return _answers_a_second(picture, plots[0], len(_CHANGED_COLOURS))


def _grouped(
    axes: Any,
    labels: Sequence[str],
    values: Mapping[str, Sequence[float | None]],
    colours: Mapping[str, str],
) -> None:
    """Draw a group of bars for each label; an x marks systems that do not keep it."""
    width = (1 - _GAP) / len(values)
    for i, (bar, heights) in enumerate(values.items()):
        places = [x + (i - (len(values) - 1) / 2) * width for x in range(len(labels))]
        drawn = [height or 0.0 for height in heights]
        axes.bar(places, drawn, width, color=colours[bar], label=name(bar))
        for x, height in zip(places, heights, strict=True):
            if not height:
                axes.annotate("x", (x, 0.0), ha="center", color=colours[bar])
    axes.set_xticks(range(len(labels)), labels)
    axes.tick_params(axis="x", length=0)


def _answers_a_second(picture: Figure, first: Any, columns: int) -> Figure:
    picture.supylabel("answers a second", fontsize=9)
    handles, labels = first.get_legend_handles_labels()
    if handles:
        picture.legend(handles, labels, loc="outside upper left", ncols=columns)
    return picture


# ---- cells ----

_CELL_COLOURS = {
    "batchmaker": BLUE,
    "padding_1": PINK,
    "padding_10": ORANGE,
    "padding_40": OCHRE,
    "merged_by_agenda": ORANGE,
    "merged_by_depth": OCHRE,
    "lazy_batching": GREEN,
    "identical_graphs": INK,
    "one_at_a_time": INK,
}
_WIDTHS = ("batchmaker", "padding_1", "padding_10", "padding_40")
_LOW_LOAD_POLICIES = ("batchmaker", "padding_10", "lazy_batching")
# Number of the figure -> its workloads, and the policies that it shows; none for all.
_LINES: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {
    7: (("lstm", "lstm_batch_64"), _LOW_LOAD_POLICIES),
    8: (("lstm",), _WIDTHS),
    11: (("lstm_24_words", "lstm_to_50_words", "lstm_to_100_words"), _WIDTHS),
    13: (("seq2seq", "seq2seq_2_devices", "seq2seq_4_devices"), ()),
    14: (("treelstm", "treelstm_batch_64"), ()),
    15: (("identical_trees", "identical_trees_batch_64"), ()),
}
_LATENCY_PARTS = {"queueing_s": "queueing, ms", "computing_s": "computing, ms"}
# The load of figure 2.9: 5,000 requests/s of the 20,000 that BatchMaker serves at most.
_LOW_LOAD = 0.25
_LEAST_MS = 0.01  # of a logarithmic axis
# Latencies above this many times the least one are beyond the plot.
_HIGHEST = 40.0
_Sweeps = dict[tuple[str, str], list[Place]]


def _cell_charts(result: Place) -> dict[str, Chart]:
    """Return the drawing functions of each figure for which the result has a workload."""
    found: dict[int, Chart] = {
        number: partial(_lines, number)
        for number, (workloads, _) in _LINES.items()
        if _sweeps(result, workloads)
    }
    if _sweeps(result, ("lstm",)):
        found[9] = _latency_parts
    return {f"_{number}": chart for number, chart in sorted(found.items())}


def _sweeps(result: Place, names: Sequence[str]) -> _Sweeps:
    """Return the points of each of these workloads, by name and how they were played."""
    found: _Sweeps = {}
    for point in result.each("points.*"):
        if point.get("application") in names:
            found.setdefault((point.get("application"), point.get("how")), []).append(point)
    return found


def _lines(number: int, result: Place) -> Figure:
    """Draw p90 latency over served requests a second, a plot for each workload."""
    workloads, shown = _LINES[number]
    sweeps = _sweeps(result, workloads)
    figure, plots = grid(8, 0.6, len(sweeps), _COLUMNS, 2.4)
    lines: dict[str, Any] = {}
    for axes, (workload, points) in fill(plots, list(sweeps.items())):
        least = float("inf")
        rated = [point for point in points if point.optional("rate")]
        policies = dict.fromkeys(point.get("policy") for point in rated)
        for policy in (each for each in policies if not shown or each in shown):
            own = [point for point in rated if point.get("policy") == policy]
            served = [point.number("requests_per_s") for point in own]
            p90 = [1000 * point.number("latency_s", "p90") for point in own]
            least = min(least, *p90)
            (lines[policy],) = axes.plot(served, p90, color=_CELL_COLOURS.get(policy), marker="o")
        if least < float("inf"):
            axes.set(ylim=(0, _HIGHEST * least))
        axes.set_title(", ".join(map(name, workload)))
    figure.supxlabel(_SERVED, fontsize=9)
    figure.supylabel("90th percentile of latency, ms", fontsize=9)
    return _with_legend(figure, lines, 4)


def _latency_parts(result: Place) -> Figure:
    """Draw the distributions of queueing and of computing at low load, as in figure 2.9."""
    sweeps = _sweeps(result, ("lstm",))
    figure = canvas(8, 0.6 + 2.4 * len(sweeps))
    plots = figure.subplots(len(sweeps), len(_LATENCY_PARTS), squeeze=False)
    lines = {}
    for row, (workload, every) in zip(plots, sweeps.items(), strict=True):
        points = _at_low_load(every)
        for axes, (part, label) in zip(row, _LATENCY_PARTS.items(), strict=True):
            for point in points:
                policy = point.get("policy")
                if policy in _LOW_LOAD_POLICIES:
                    run = point.inside("runs", 0) if "runs" in point.get() else point
                    times = [max(1000 * s, _LEAST_MS) for s in run.get("quantiles", part)]
                    shares = [100 * i / (len(times) - 1) for i in range(len(times))]
                    (lines[policy],) = axes.plot(times, shares, color=_CELL_COLOURS[policy])
            axes.set(xscale="log", xlabel=label)
            rate = points[0].number("rate") if points else 0.0
            axes.set_title(f"{', '.join(map(name, workload))}, {rate:.0f} requests/s")
    figure.supylabel("requests, %", fontsize=9)
    return _with_legend(figure, lines, 4)


def _at_low_load(points: Sequence[Place]) -> list[Place]:
    """Return every policy's point at the rate next to a quarter of BatchMaker's peak."""
    ours = [point for point in points if point.get("policy") == "batchmaker"]
    rates = {rate for point in points if (rate := point.optional("rate"))}
    if not ours or not rates:
        return []
    low = _LOW_LOAD * max(point.number("requests_per_s") for point in ours)
    wanted = min(rates, key=lambda rate: abs(rate - low))
    return [point for point in points if point.optional("rate") == wanted]


Chart = Callable[[Place], Figure]
# Kind -> the ends of the figures' names, and their drawing functions. Other kinds have only tables.
_CHARTS: dict[str, Callable[[Place], Mapping[str, Chart]]] = {
    "offline": lambda result: {"_peers": peers} if result.has_peers else {},
    "policies": _policy_charts,
    "online": lambda _: {"": load_curves},
    "conversations": _conversation_charts,
    "pensieve": lambda _: {"": _panels},
    "flover": lambda _: {"_4": _constant, "_5": _poisson, "_6": _uniform, "_7": _progress},
    "exegpt": lambda _: {
        "_6": partial(_systems, 6),
        "_7": partial(_systems, 7),
        "_8": partial(_systems, 8),
        "_11": _changed,
    },
    "cells": _cell_charts,
}


def charts(result: Place) -> dict[str, Chart]:
    """Return the drawing function of each figure, by its file name without the extension.

    `svg` draws figures, and raises ResultFileError if the file lacks a field of its kind.
    """
    drawn = _CHARTS[result.kind](result) if result.kind in _CHARTS else {}
    return {f"{result.path.stem}{end}": chart for end, chart in drawn.items()}
