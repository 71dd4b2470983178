"""Pictures of a report, and of the tiers that hold the KV of conversations."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxserve.engine.recorder import RequestRecord, StepRecord
from jaxserve.memory.page_cache import Tier


def over_replicas(steps: Sequence[StepRecord], value: Callable[[StepRecord], int]) -> list[int]:
    """Return, for each step, the sum of its value and the other replicas' latest values."""
    latest: dict[int, int] = {}
    sums = []
    for step in steps:
        latest[step.replica] = value(step)
        sums.append(sum(latest.values()))
    return sums


class Recorded(Protocol):
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


def draw(report: Recorded) -> Figure:
    """Draw the batch, the pages and the latencies in three panels; a report may be empty."""
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    batch, pages, latency = figure.subplots(3, 1)
    figure.suptitle(f"{len(report.requests)} requests, policy {report.policy}")
    origin_s = min((step.submitted_s for step in report.steps), default=0.0)
    times = [step.submitted_s - origin_s for step in report.steps]
    _draw_batch(batch, times, report)
    _draw_pages(pages, times, report)
    _draw_latency(latency, report)
    return figure


def _draw_batch(axes: Any, times: Sequence[float], report: Recorded) -> None:
    running = over_replicas(report.steps, lambda step: step.num_running)
    waiting = over_replicas(report.steps, lambda step: step.num_running + step.num_waiting)
    axes.fill_between(times, running, step="post", alpha=0.7, label="running")
    axes.fill_between(times, running, waiting, step="post", alpha=0.3, label="waiting")
    axes.set(xlabel="time (s)", ylabel="sequences", ylim=(0, None))
    axes.legend(loc="upper right", frameon=False)


def _draw_pages(axes: Any, times: Sequence[float], report: Recorded) -> None:
    owned = over_replicas(report.steps, lambda step: step.pages_owned)
    reserved = over_replicas(report.steps, lambda step: step.pages_owned + step.pages_reserved)
    axes.fill_between(times, owned, step="post", alpha=0.7, label="in use")
    axes.fill_between(times, owned, reserved, step="post", alpha=0.3, label="reserved")
    axes.axhline(report.num_pages, color="0.4", linestyle="--", linewidth=1, label="pool")
    axes.set(xlabel="time (s)", ylabel="pages", ylim=(0, None))
    axes.legend(loc="upper right", frameon=False)


def _draw_latency(axes: Any, report: Recorded) -> None:
    timings = [request.timing for request in report.requests]
    for label, values in (
        ("first token", [t.time_to_first_token_s for t in timings]),
        ("whole answer", [t.latency_s for t in timings]),
    ):
        ordered = sorted(value for value in values if value is not None)
        shares = [100 * (i + 1) / len(ordered) for i in range(len(ordered))]
        axes.step(ordered, shares, where="post", label=label)
    axes.set(xlabel="latency (s)", ylabel="requests within (%)", xlim=(0, None), ylim=(0, 100))
    axes.legend(loc="lower right", frameon=False)


_COLOURS: dict[Tier, str] = {
    "device": "#0072B2",
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
