"""Charts of results in one style: no background, ink for light and dark pages."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.common.repeats import Spread
from benchmarks.figures.render import name
from benchmarks.figures.results import Place, bound_name, by_policy, is_quantised

INK = "#767676"  # a contrast of 4 to 5 on white and on near black
OURS = "#0072B2"
# Okabe and Ito's palette, tell-apart for colour-blind readers; the pale ones darkened for white.
COLOURS = {
    "jaxserve": OURS,
    "auto": OURS,
    "vllm_like": OURS,
    "flover": "#D55E00",
    "flover_without_shuffle": "#D55E00",
    "orca": "#009E73",
    "fastertransformer": "#C0619A",
    "triton_window": "#A67C00",
    "concurrent_instances": INK,
    "oracle": "#3D8FC0",
}
# Parts of a run's seconds, as in figure 6 of the S3 paper.
PARTS = {"generation": OURS, "penalty": "#D55E00", "overhead": "#A67C00"}
MARKERS = {
    "flover": "o",
    "orca": "s",
    "vllm_like": "D",
    "fastertransformer": "^",
    "triton_window": "v",
    "concurrent_instances": "X",
}
_RC: dict[Any, Any] = {
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.size": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    # Text stays text, and the same results give the same file.
    "svg.fonttype": "none",
    "svg.hashsalt": "jaxserve",
}
_LABEL_PT = 11.0
_LETTER_PT = 5.2


def canvas(width: float, height: float) -> Figure:
    """Return an empty figure, sizes in inches; for use within `svg`."""
    return Figure(figsize=(width, height), layout="constrained")


def line(axes: Any, policy: str, x: Sequence[float], y: Sequence[float], *, marks: bool = True):
    """Draw a policy's line in its own colour and with its own marker."""
    dashes = "--" if policy == "flover_without_shuffle" else "-"
    marker = MARKERS.get(policy, "o") if marks else None
    axes.plot(x, y, dashes, color=COLOURS.get(policy, "#3D8FC0"), marker=marker, label=name(policy))


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
    colours = [COLOURS.get(each, INK) for each in names]
    medians = [value.median for value in values]
    below = [value.median - value.low for value in values]
    above = [value.high - value.median for value in values]
    drawn = axes.barh(
        [name(each) for each in names],
        medians,
        color=colours,
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


def peers(result: Place) -> Figure:
    """Draw the engines that ran, the fastest on top, and the bound as a line."""
    rates = {
        name: result.inside("compare", "engines", name).spread("output_tokens_per_s")
        for name, figures in result.items("compare", "engines")
        if not figures.get("error")
    }
    names = sorted(rates, key=lambda name: -rates[name].median)
    figure = canvas(7, 0.9 + 0.32 * len(names))
    axes = figure.subplots()
    values = [rates[name] for name in names]
    bars(axes, names, values, title="output tokens a second", form=".0f")
    if is_quantised(result):  # The bound is that of weights in the model's dtype.
        return figure
    bound = result.number("bound", "output_tokens_per_s")
    axes.axvline(bound, color=INK, linestyle="--", linewidth=1)
    axes.annotate(
        f"{bound_name(result)}: {bound:.0f}",
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
    names = [name for name, _ in result.items("policies")]
    rates = [result.inside("policies", name).spread("output_tokens_per_s") for name in names]
    spreads = (
        result.inside("policies", name).optional_spread("latency_s", "p50") for name in names
    )
    latencies = [found for found in spreads if found is not None]
    figure = canvas(8 if latencies else 5, 0.6 + 0.32 * len(names))
    if not latencies:
        axes = figure.subplots()
        bars(axes, names, rates, title="output tokens a second", form=".0f")
        return figure
    left, right = figure.subplots(1, 2, sharey=True)
    bars(left, names, rates, title="output tokens a second", form=".0f")
    bars(right, names, latencies, title="median latency, s", form=".1f")
    left.invert_yaxis()  # shared, and turned twice
    return figure


def has_latency_split(result: Place) -> bool:
    """Return whether the runs used a predictor and have the parts of their time."""
    if not result.get("arguments").get("predictor"):
        return False
    return all("latency_split_s" in figures for _, figures in result.items("policies"))


def latency_split(result: Place) -> Figure:
    """Draw figure 6 of the S3 paper: the parts of the seconds of a run."""
    names = [name for name, _ in result.items("policies")]
    figure = canvas(7, 0.8 + 0.32 * len(names))
    axes = figure.subplots()
    before = [0.0] * len(names)
    for part, colour in PARTS.items():
        own = [result.number("policies", name, "latency_split_s", part) for name in names]
        axes.barh([name(each) for each in names], own, 0.62, before, color=colour, label=part)
        before = [begin + length for begin, length in zip(before, own, strict=True)]
    axes.invert_yaxis()
    axes.set_title("seconds of the run")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.legend(frameon=False, ncols=len(PARTS), loc="upper left", bbox_to_anchor=(0, -0.1))
    return figure


def online(result: Place) -> Figure:
    """Draw latency over the requests served, with one line for each policy."""
    return _load_curves(result, ("policies",))


def conversations(number: int, result: Place) -> Figure:
    """Draw a set of conversations as figures 3.12, 3.15 and 3.16 of the Pensieve thesis."""
    figure = _load_curves(result, ("sets", number, "policies"))
    rounds = result.number("sets", number, "min_rounds")
    reaction_s = result.number("sets", number, "reaction_s")
    figure.suptitle(
        f"{rounds:.0f} rounds or more, back after {reaction_s:g} s",
        x=0.01,
        ha="left",
        fontsize=9,
        color=INK,
    )
    return figure


def _load_curves(result: Place, at: tuple[str | int, ...]) -> Figure:
    figure = canvas(7, 3.6)
    axes = figure.subplots()
    for policy, _ in result.items(*at):
        points = [(*at, policy, "points", i) for i, _ in result.items(*at, policy, "points")]
        served = [result.number(*point, "requests_per_s") for point in points]
        p90 = [result.number(*point, "normalised_latency_s", "p90") for point in points]
        line(axes, policy, served, p90)
    axes.set(xlabel="requests served a second", ylim=(0, None), xlim=(0, None))
    axes.set_title("90th percentile of latency over output tokens, s")
    label_lines(axes)
    return figure


def simulate(result: Place) -> Figure:
    """Draw predicted over measured throughput, with one point for each policy."""
    figure = canvas(4, 4)
    axes: Any = figure.subplots()
    places = [("policies", i) for i, _ in result.items("policies")]
    measured, predicted = (
        [result.inside(*at).spread(kind, "output_tokens_per_s").median for at in places]
        for kind in ("measured", "predicted")
    )
    axes.axline((0, 0), slope=1, color=INK, linewidth=1, linestyle="--")
    axes.scatter(measured, predicted, color=OURS, s=18, zorder=3)
    most = 1.08 * max([*measured, *predicted, 1.0])
    axes.set(xlim=(0, most), ylim=(0, most), xlabel="measured")
    axes.set_title("output tokens a second, predicted")
    axes.set_aspect("equal")
    return figure


def _constant(result: Place) -> Figure:
    figure = canvas(10, 3.2)
    total, rate, latency = figure.subplots(1, 3)
    alone_s = result.number("alone_s")
    for policy, runs in by_policy(result, "constant").items():
        counts = [result.number("constant", i, "num_requests") for i in runs]
        mean_s = [result.number("constant", i, "latency_s", "mean") for i in runs]
        line(total, policy, counts, [result.number("constant", i, "wall_s") for i in runs])
        tokens = [result.number("constant", i, "output_tokens_per_s") for i in runs]
        line(rate, policy, counts, tokens)
        line(latency, policy, counts, [each / alone_s for each in mean_s])
    total.set_title("total time, s")
    rate.set_title("output tokens a second")
    latency.set_title("mean latency over that of one alone")
    for axes in (total, rate, latency):
        axes.set(xlabel="requests", ylim=(0, None))
        _log2(
            axes,
            [result.number("constant", i, "num_requests") for i, _ in result.items("constant")],
        )
    label_lines(latency)
    return figure


def _poisson(result: Place) -> Figure:
    figure = canvas(6.5, 3.4)
    axes = figure.subplots()
    alone_s = result.number("alone_s")
    shares: list[float] = []
    for policy, runs in by_policy(result, "poisson").items():
        shares = [result.number("poisson", i, "mean_interval_s") / alone_s for i in runs]
        line(axes, policy, shares, [result.number("poisson", i, "wall_s") for i in runs])
    axes.set_xscale("log")
    axes.set_xticks(shares, [f"{share:.2g}" for share in shares])
    axes.minorticks_off()
    axes.set(xlabel="mean interval between requests over the time of one alone", ylim=(0, None))
    axes.set_title("total time, s")
    label_lines(axes)
    return figure


def _uniform(result: Place) -> Figure:
    figure = canvas(6.5, 3.4)
    axes = figure.subplots()
    longest: list[float] = []
    for policy, runs in by_policy(result, "uniform").items():
        longest = [result.number("uniform", i, "longest") for i in runs]
        line(axes, policy, longest, [result.number("uniform", i, "wall_s") for i in runs])
    axes.set_xticks(longest)
    axes.set(xlabel="tokens of the longest answer", ylim=(0, None))
    axes.set_title("total time, s")
    label_lines(axes)
    return figure


def _progress(result: Place) -> Figure:
    """Draw cumulative tokens with the most requests, and for the other windows."""
    figure = canvas(7, 3.6)
    axes: Any = figure.subplots()
    for part in ("constant", "windows"):
        for policy, runs in by_policy(result, part).items():
            kept = [i for i in runs if "requests" in result.get(part, i)]
            if kept:
                times, tokens = _cumulative(result, part, kept[-1])
                line(axes, policy, times, tokens, marks=False)
    axes.set(xlabel="time, s", xlim=(0, None), ylim=(0, None))
    axes.set_title("output tokens so far")
    label_lines(axes, above=True)
    return figure


def _cumulative(result: Place, part: str, run: int) -> tuple[list[float], list[float]]:
    """Return times and counts of tokens, evenly spaced between an answer's first and its end."""
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


_FLOVER = {"_4": _constant, "_5": _poisson, "_6": _uniform, "_7": _progress}


# Each line of a plot has its own colour here.
_THESIS_COLOURS = {
    "vllm_like": INK,
    "s3_oracle": "#009E73",
    "pensieve_device_only": "#C0619A",
    "pensieve_lru": "#A67C00",
    "pensieve": "#D55E00",
    "auto": OURS,
}
_COLUMNS = 2


def _panels(result: Place) -> Figure:
    sets = [s for s, _ in result.items("sets")]
    num_rows = -(-len(sets) // _COLUMNS)
    figure = canvas(8, 0.4 + 2.3 * num_rows)
    plots = figure.subplots(num_rows, _COLUMNS, squeeze=False).ravel()
    bound = result.number("arguments", "bound")
    lines = {}
    for axes, s in zip(plots, sets, strict=False):
        for policy, _ in result.items("sets", s, "policies"):
            at = ("sets", s, "policies", policy, "points")
            points = [(*at, i) for i, _ in result.items(*at)]
            served = [result.number(*point, "requests_per_s") for point in points]
            p90 = [result.number(*point, "normalised_latency_s", "p90") for point in points]
            (lines[policy],) = axes.plot(served, p90, color=_THESIS_COLOURS.get(policy), marker="o")
        axes.axhline(bound, color=INK, linestyle="--", linewidth=1)
        axes.set(ylim=(0, 1.5 * bound), title=_panel_title(result, s))
    for axes in plots[len(sets) :]:
        axes.set_axis_off()
    figure.supxlabel("requests served a second", fontsize=9)
    figure.supylabel("90th percentile of latency over output tokens, s", fontsize=9)
    names = [name(policy) for policy in lines]
    figure.legend(lines.values(), names, loc="outside upper left", ncols=len(names), frameon=False)
    return figure


def _panel_title(result: Place, s: int) -> str:
    each = result.get("sets", s)
    return (
        f"{each['figure']}: {each['model']}, {each['min_rounds']} rounds or more, "
        f"{each['reaction_s']:g} s"
    )


_SYSTEM_COLOURS = {
    "fastertransformer": INK,
    "deepspeed": "#A67C00",
    "orca": "#009E73",
    "vllm": "#C0619A",
    "rra": OURS,
    "waa": "#D55E00",
    "continuous": "#56B4E9",
}
_BAR_COLUMNS = 3
_GAP = 0.2


def _systems(figure: int, result: Place) -> Figure:
    """Draw throughput: a plot for each model and task, a group for each bound, a bar a system."""
    names = (
        tuple(_SYSTEM_COLOURS) if figure == 7 else ("fastertransformer", "rra", "waa", "continuous")
    )
    points = result.get("figure_7" if figure == 7 else "points")
    chosen = [point for point in points if figure == 7 or point["figure"] == figure]
    groups: dict[str, list[dict[str, Any]]] = {}
    for point in chosen:
        title = f"{point['model']}, {point['num_devices']} {point['cluster']}, {point['task']}"
        groups.setdefault(title, []).append(point)
    num_rows = max(1, -(-len(groups) // _BAR_COLUMNS))
    picture = canvas(9, 0.8 + 1.9 * num_rows)
    plots = picture.subplots(num_rows, _BAR_COLUMNS, squeeze=False).ravel()
    for axes, (title, own) in zip(plots, groups.items(), strict=False):
        values = {name: [p["per_s_of"].get(name) for p in own] for name in names}
        _grouped(axes, [_bound(p) for p in own], values)
        axes.set_title(title)
    for axes in plots[len(groups) :]:
        axes.set_axis_off()
    picture.supxlabel("latency bound, s", fontsize=9)
    picture.supylabel("answers a second", fontsize=9)
    _legend(picture, plots[0], names)
    return picture


def _changed(result: Place) -> Figure:
    """Draw figure 11 of WAA: throughput without a change and planned anew, and the p99 latency."""
    rows = [row for _, row in result.items("figure_11") if row["policy"] == "waa"]
    kinds = list(dict.fromkeys(row["changed"] for row in rows))
    picture = canvas(9, 2.9)
    plots = picture.subplots(1, max(1, len(kinds)), squeeze=False).ravel()
    for axes, kind in zip(plots, kinds, strict=False):
        own = [row for row in rows if row["changed"] == kind]
        values = {
            "schedule left alone": [row["left_alone_per_s"] for row in own],
            "planned anew": [row["planned_per_s"] for row in own],
        }
        colours = {"schedule left alone": OURS, "planned anew": "#D55E00"}
        _grouped(axes, [f"{row['by']:g}" for row in own], values, colours)
        latency = axes.twinx()
        bound_s = own[0]["bound_s"]
        line = [row["left_alone_latency_s"] / bound_s for row in own]
        latency.plot(range(len(own)), line, color=INK, marker="o", label="p99 over bound")
        latency.set_ylim(0, 1.4)
        axes.set_title(f"{kind} changed; line: p99 over bound")
    picture.supylabel("answers a second", fontsize=9)
    _legend(picture, plots[0], ("schedule left alone", "planned anew"))
    return picture


def _grouped(
    axes: Any,
    labels: Sequence[str],
    values: dict[str, list[float | None]],
    colours: dict[str, str] = _SYSTEM_COLOURS,
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


def _legend(picture: Figure, axes: Any, names: Sequence[str]) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        picture.legend(handles, labels, loc="outside upper left", ncols=len(names), frameon=False)


def _bound(point: dict[str, Any]) -> str:
    return "none" if point["bound_s"] is None else f"{point['bound_s']:.1f}"


_EXEGPT: dict[str, Callable[[Place], Figure]] = {
    **{f"_{number}": partial(_systems, number) for number in (6, 7, 8)},
    "_11": _changed,
}


_CELL_COLOURS = {
    "batchmaker": OURS,
    "padding_1": "#C0619A",
    "padding_10": "#D55E00",
    "padding_40": "#A67C00",
    "merged_by_agenda": "#D55E00",
    "merged_by_depth": "#A67C00",
    "lazy_batching": "#009E73",
    "identical_graphs": INK,
    "one_at_a_time": INK,
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
_LATENCY_PARTS = {"queueing_s": "queueing, ms", "computing_s": "computing, ms"}
# The load of figure 2.9: 5,000 requests/s of the 20,000 that BatchMaker serves at most.
_LOW_LOAD = 0.25
_LEAST_MS = 0.01  # of a logarithmic axis
# Latencies above this many times the least one are beyond the plot.
_HIGHEST = 40.0


def _cell_charts(result: Place) -> dict[str, Callable[[Place], Figure]]:
    """Return the drawing functions of each figure for which the result has a workload."""
    found: dict[int, Callable[[Place], Figure]] = {
        number: partial(_lines, number) for number in _LINES if _workloads(result, number)
    }
    if _sweeps(result, ("lstm",)):
        found[9] = _latency_parts
    return {f"_{number}": chart for number, chart in sorted(found.items())}


def _workloads(result: Place, number: int) -> list[tuple[str, str]]:
    return _sweeps(result, _LINES[number][0])


def _sweeps(result: Place, names: Sequence[str]) -> list[tuple[str, str]]:
    points = [point for _, point in result.items("points")]
    found = dict.fromkeys((point["application"], point["how"]) for point in points)
    return [workload for workload in found if workload[0] in names]


def _lines(number: int, result: Place) -> Figure:
    """Draw p90 latency over served requests a second, a plot for each workload."""
    workloads = _workloads(result, number)
    num_rows = -(-len(workloads) // _COLUMNS)
    figure = canvas(8, 0.6 + 2.4 * num_rows)
    plots = figure.subplots(num_rows, _COLUMNS, squeeze=False).ravel()
    lines = {}
    for axes, workload in zip(plots, workloads, strict=False):
        lines |= _plot_sweep(axes, result, workload, _LINES[number][1])
    for axes in plots[len(workloads) :]:
        axes.set_axis_off()
    figure.supxlabel("requests served a second", fontsize=9)
    figure.supylabel("90th percentile of latency, ms", fontsize=9)
    _legend_of_lines(figure, lines)
    return figure


def _plot_sweep(axes, result: Place, workload: tuple[str, str], policies: Sequence[str]) -> dict:
    points = [(policy, at) for policy, at in _points_of(result, workload) if _rate(result, at)]
    lines, least = {}, float("inf")
    for policy in dict.fromkeys(policy for policy, _ in points):
        if policies and policy not in policies:
            continue
        own = [at for other, at in points if other == policy]
        served = [result.number(*at, "requests_per_s") for at in own]
        p90 = [1000 * result.number(*at, "latency_s", "p90") for at in own]
        least = min(least, *p90)
        (lines[policy],) = axes.plot(served, p90, color=_CELL_COLOURS.get(policy), marker="o")
    if lines:
        axes.set(ylim=(0, _HIGHEST * least))
    axes.set_title(", ".join(map(name, workload)))
    return lines


def _latency_parts(result: Place) -> Figure:
    """Draw the distributions of queueing and of computing at low load, as in figure 2.9."""
    workloads = _sweeps(result, ("lstm",))
    figure = canvas(8, 0.6 + 2.4 * len(workloads))
    plots = figure.subplots(len(workloads), len(_LATENCY_PARTS), squeeze=False)
    lines = {}
    for row, workload in zip(plots, workloads, strict=True):
        points = _at_low_load(result, workload)
        for axes, (part, label) in zip(row, _LATENCY_PARTS.items(), strict=True):
            for policy, at in points:
                if policy in _LINES[7][1]:
                    run = (*at, "runs", 0) if "runs" in result.get(*at) else at
                    times = [1000 * s for s in result.get(*run, "quantiles", part)]
                    shares = [100 * i / (len(times) - 1) for i in range(len(times))]
                    (lines[policy],) = axes.plot(
                        [max(each, _LEAST_MS) for each in times],
                        shares,
                        color=_CELL_COLOURS[policy],
                    )
            axes.set(xscale="log", xlabel=label)
            rate = result.number(*points[0][1], "rate") if points else 0.0
            axes.set_title(f"{', '.join(map(name, workload))}, {rate:.0f} requests/s")
    figure.supylabel("requests, %", fontsize=9)
    _legend_of_lines(figure, lines)
    return figure


def _at_low_load(result: Place, workload: tuple[str, str]) -> list[tuple[str, tuple[Any, ...]]]:
    """Return every policy's point at the rate next to a quarter of BatchMaker's peak."""
    points = _points_of(result, workload)
    served = [
        result.number(*at, "requests_per_s") for policy, at in points if policy == "batchmaker"
    ]
    rates = {rate for _, at in points if (rate := _rate(result, at))}
    if not served or not rates:
        return []
    wanted = min(rates, key=lambda rate: abs(rate - _LOW_LOAD * max(served)))
    return [(policy, at) for policy, at in points if _rate(result, at) == wanted]


def _points_of(result: Place, workload: tuple[str, str]) -> list[tuple[str, tuple[Any, ...]]]:
    return [
        (point["policy"], ("points", index))
        for index, point in result.items("points")
        if (point["application"], point["how"]) == workload
    ]


def _rate(result: Place, at: tuple[Any, ...]) -> float | None:
    return result.optional(*at, "rate")


def _legend_of_lines(figure: Figure, lines: dict) -> None:
    names = [name(policy) for policy in lines]
    figure.legend(lines.values(), names, loc="outside upper left", ncols=4, frameon=False)


Chart = Callable[[Place], Figure]


def _conversation_charts(result: Place) -> dict[str, Chart]:
    if "," not in result.get("arguments")["rates"]:
        return {}  # one rate makes no line
    return {f"_{i + 1}": partial(conversations, i) for i, _ in result.items("sets")}


def _policy_charts(result: Place) -> dict[str, Chart]:
    split = {"_split": latency_split} if has_latency_split(result) else {}
    return {"": policies, **split}


# Kind -> the ends of the figures' names, and their drawing functions. Other kinds have only tables.
_CHARTS: dict[str, Callable[[Place], Mapping[str, Chart]]] = {
    "offline": lambda result: {"_peers": peers} if result.has_peers else {},
    "policies": _policy_charts,
    "online": lambda _: {"": online},
    "conversations": _conversation_charts,
    "simulate": lambda _: {"": simulate},
    "pensieve": lambda _: {"": _panels},
    "flover": lambda _: _FLOVER,
    "exegpt": lambda _: _EXEGPT,
    "cells": _cell_charts,
}


def charts(result: Place) -> dict[str, Chart]:
    """Return the drawing function of each figure, by its file name without the extension.

    `svg` draws figures, and raises ResultFileError if the file lacks a field of its kind.
    """
    drawn = _CHARTS[result.kind](result) if result.kind in _CHARTS else {}
    return {f"{result.path.stem}{end}": chart for end, chart in drawn.items()}
