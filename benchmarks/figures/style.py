"""One look for every figure: no background, and ink that reads on light and on dark pages."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.common.repeats import Spread

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
MARKERS = {"flover": "o", "orca": "s", "vllm_like": "D", "fastertransformer": "^",
           "triton_window": "v", "concurrent_instances": "X"}  # fmt: skip
RC: dict[Any, Any] = {
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


def name(identifier: str) -> str:
    """Return an identifier in words, as tables and charts show it."""
    return identifier.replace("_", " ")


def line(axes: Any, policy: str, x: Sequence[float], y: Sequence[float], *, marks: bool = True):
    """Draw a policy's line in its own colour and with its own mark."""
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
            drawn.get_label(), end, (left - x, bottom - y),
            textcoords="offset points", va="center", color=drawn.get_color(), annotation_clip=False,
        )  # fmt: skip


def bars(axes: Any, names: Sequence[str], values: Sequence[Spread], *, title: str, form: str):
    """Draw horizontal bars of medians with their ranges, the first on top, values at the ends."""
    colours = [COLOURS.get(each, INK) for each in names]
    medians = [value.median for value in values]
    below = [value.median - value.low for value in values]
    above = [value.high - value.median for value in values]
    drawn = axes.barh(
        [name(each) for each in names], medians, color=colours, height=0.62,
        xerr=[below, above] if any(below) or any(above) else None,
        error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2},
    )  # fmt: skip
    axes.bar_label(drawn, labels=[format(median, form) for median in medians], padding=4)
    axes.invert_yaxis()
    axes.set_title(title)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    axes.set_xticks([])
    axes.margins(x=0.12)


def svg(draw: Callable[[], Figure], identifier: str) -> bytes:
    """Return what `draw` draws as SVG, with the identifier of the result in its metadata."""
    data = io.BytesIO()
    with matplotlib.rc_context(RC):
        draw().savefig(data, format="svg", metadata={"Date": None, "Identifier": identifier})
    return data.getvalue()
