"""Pictures of a report, and of the tiers that hold the KV of conversations."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final

import numpy as np
from matplotlib import rc_context
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxserve.core.metrics import spread
from jaxserve.engine.recorder import RequestRecord, StepRecord, over_replicas
from jaxserve.memory.page_cache import Tier
from jaxserve.report.style import BLUE, GREEN, INK, OCHRE, ORANGE, STYLE


class Drawable(Protocol):
    """The part of a `Report` that a picture needs."""

    @property
    def policy(self) -> str: ...

    @property
    def steps(self) -> Sequence[StepRecord]: ...

    @property
    def requests(self) -> Sequence[RequestRecord]: ...

    @property
    def num_pages(self) -> int: ...


@final
class Picture:
    """A Matplotlib figure that a notebook displays, without the global state of pyplot."""

    def __init__(self, figure: Figure):
        self.figure = figure

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        self.figure.savefig(data, format="png")
        return data.getvalue()


def draw(report: Drawable) -> Figure:
    """Draw throughput, batch, pages and latencies in four panels; a report may be empty."""
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 8.5), layout="constrained")
        rates, batch, pages, latency = figure.subplots(4, 1)
        origin_s = min((step.submitted_s for step in report.steps), default=0.0)
        times = [step.submitted_s - origin_s for step in report.steps]
        num_output = sum(request.num_output_tokens for request in report.requests)
        figure.suptitle(
            f"{len(report.requests):,} requests with {num_output:,} output tokens, "
            f"policy {report.policy}",
            x=0.01,
            ha="left",
        )
        _draw_rates(rates, report, origin_s)
        _draw_batch(batch, times, report)
        _draw_pages(pages, times, report)
        for axes in (batch, pages):
            axes.sharex(rates)
        _draw_latency(latency, report)
    return figure


def _draw_rates(axes: Any, report: Drawable, origin_s: float) -> None:
    """Draw tokens a second, of prompts and answers, in equal parts of the time."""
    ended = [(s.collected_s - origin_s, s.num_tokens) for s in report.steps if s.collected_s]
    axes.set(ylabel="computed tokens/s", title="throughput")
    if ended:
        ends, tokens = zip(*ended, strict=True)
        num_parts = min(60, len(ended))
        counts, edges = np.histogram(ends, num_parts, (0.0, max(ends)), weights=tokens)
        per_s = counts / (max(ends) / num_parts)
        axes.stairs(per_s, edges, fill=True, color=BLUE, alpha=0.6, linewidth=0)
        mean = sum(tokens) / max(ends)
        axes.axhline(mean, color=INK, linestyle="--", linewidth=1, label=f"mean {mean:,.0f}")
        axes.set_ylim(0, None)
        _legend_above(axes)


def _draw_batch(axes: Any, times: Sequence[float], report: Drawable) -> None:
    running = over_replicas(report.steps, lambda step: step.num_running)
    waiting = over_replicas(report.steps, lambda step: step.num_running + step.num_waiting)
    axes.fill_between(times, running, step="post", color=BLUE, alpha=0.7, lw=0, label="running")
    axes.fill_between(
        times, running, waiting, step="post", color=ORANGE, alpha=0.4, lw=0, label="waiting"
    )
    axes.set(ylabel="sequences", ylim=(0, None), title="batch")
    _legend_above(axes)


def _draw_pages(axes: Any, times: Sequence[float], report: Drawable) -> None:
    """Draw the pages by kind, at a scale that shows them also where the pool is much larger."""
    owned = over_replicas(report.steps, lambda step: step.pages_owned)
    reserved = over_replicas(report.steps, lambda step: step.pages_owned + step.pages_reserved)
    kept = over_replicas(report.steps, lambda step: step.pages_owned + step.pages_cached)
    axes.fill_between(times, owned, step="post", color=BLUE, alpha=0.7, lw=0, label="in use")
    axes.fill_between(
        times, owned, reserved, step="post", color=OCHRE, alpha=0.4, lw=0, label="reserved"
    )
    axes.step(times, kept, where="post", color=GREEN, lw=1.2, label="in use or cached")
    most = max([*reserved, *kept], default=0)
    is_large = report.num_pages > 3 * most > 0
    axes.set(
        xlabel="time (s)",
        ylabel="pages",
        ylim=(0, 1.2 * most if is_large else None),
        title=f"pages of {report.num_pages:,} in the pool",
    )
    if not is_large:
        axes.axhline(report.num_pages, color=INK, linestyle="--", linewidth=1, label="pool")
    _legend_above(axes)


def _draw_latency(axes: Any, report: Drawable) -> None:
    timings = [request.timing for request in report.requests]
    for label, colour, values in (
        ("first token", ORANGE, [t.time_to_first_token_s for t in timings]),
        ("whole answer", BLUE, [t.latency_s for t in timings]),
    ):
        ordered = sorted(value for value in values if value is not None)
        shares = [100 * (i + 1) / len(ordered) for i in range(len(ordered))]
        if found := spread(ordered):
            label += f": p50 {found['p50']:.3g} s, p99 {found['p99']:.3g} s"
        axes.step(ordered, shares, where="post", color=colour, label=label)
    axes.set(xlabel="latency (s)", ylabel="requests within (%)", xlim=(0, None), ylim=(0, 101))
    axes.set_title("latency")
    _legend_above(axes)


def _legend_above(axes: Any) -> None:
    """Put the legend beside the title, where it hides nothing."""
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, borderaxespad=0.2)


_COLOURS: dict[Tier, str] = {
    "device": BLUE,
    "host": "#56B4E9",
    "disk": "#E69F00",
    "nowhere": "#D0D0D0",
}


def draw_residency(contexts: Mapping[str, Sequence[Tier]]) -> Picture:
    """Draw a row per context and a square per page, the first page on the left.

    Args:
      contexts: name -> the result of `Runtime.residency` for its tokens.
    """
    longest = max((len(tiers) for tiers in contexts.values()), default=0)
    figure = Figure(figsize=(9, 1.2 + 0.28 * len(contexts)), layout="constrained")
    axes = figure.subplots()
    order = list(_COLOURS)
    cells = np.full((max(1, len(contexts)), max(1, longest)), np.nan)
    for row, tiers in enumerate(contexts.values()):
        cells[row, : len(tiers)] = [order.index(tier) for tier in tiers]
    axes.pcolormesh(
        cells,
        cmap=ListedColormap(list(_COLOURS.values())),
        vmin=-0.5,
        vmax=len(order) - 0.5,
        edgecolors="white",
        linewidth=0.5,
    )
    axes.set_yticks(np.arange(len(contexts)) + 0.5, list(contexts))
    axes.invert_yaxis()
    axes.set(xlabel="page of the context", title="residency of the KV")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.legend(
        handles=[Patch(color=colour, label=tier) for tier, colour in _COLOURS.items()],
        frameon=False,
        loc="upper left",
        bbox_to_anchor=(1, 1),
    )
    return Picture(figure)
