"""The page of an arena: its table, latency against load, memory over time, and every request."""

from __future__ import annotations

import html
import io
import statistics
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any, TypeAlias

from matplotlib import rc_context
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxserve.core.metrics import spread
from jaxserve.core.sizes import format_bytes
from jaxserve.planning.arena import ArenaResult, ArenaRun
from jaxserve.report.style import BLUE, GREEN, INK, OCHRE, ORANGE, PINK, SKY, STYLE

Played: TypeAlias = tuple[ArenaRun, ArenaResult]

_COLOURS = (BLUE, ORANGE, GREEN, PINK, OCHRE, SKY)
_DASHES = ("-", "--", ":", "-.")
# What a request does, from one of its times to the next.
_PHASES = {"waits": ORANGE, "its prompt": OCHRE, "its answer": BLUE}

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: auto; padding: 1rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; white-space: nowrap; }}
th, td {{ padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #8884; }}
th:first-child, td:first-child {{ text-align: left; }}
svg {{ max-width: 100%; height: auto; }}
</style>
<h1>{title}</h1>
<p>{about}</p>
<div class="wide"><table>
{table}
</table></div>
{picture}
</html>
"""


def arena_page(
    title: str, about: str, rows: Sequence[Sequence[str]], played: Sequence[Played]
) -> str:
    """Return a page of HTML that needs no other file; the first of `rows` is the table's head."""
    head, *body = rows
    lines = [_row("th", head), *(_row("td", row) for row in body)]
    picture = io.StringIO()
    draw_arena(played).savefig(picture, format="svg", transparent=True)
    svg = picture.getvalue()
    return _PAGE.format(
        title=html.escape(title),
        about=html.escape(about),
        table="\n".join(lines),
        picture=svg[svg.index("<svg") :],
    )


def _row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def draw_arena(played: Sequence[Played]) -> Figure:
    """Draw latency against load for each pool, and memory and requests of the busiest run.

    That is the one with the highest load, in the smallest pool, of the first part that every policy
    has; runs that failed are left out.
    """
    played = [each for each in played if each[1].requests]
    policies = list(dict.fromkeys(run.policy for run, _ in played))
    pools = sorted({run.kv_memory for run, _ in played})
    busiest = _busiest(played)
    with rc_context(STYLE):
        heights = [2.6] * len(pools) + [2.6] + [1.1] * len(busiest)
        figure = Figure(figsize=(9, sum(heights) + 0.4), layout="constrained")
        if not played:
            return figure
        axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        styles = dict(zip(policies, _styles(), strict=False))
        for own, pool in zip(axes, pools, strict=False):
            _draw_latency(own, [each for each in played if each[0].kv_memory == pool], styles)
            own.set_title(f"p90 of the latency (parts' range shaded), KV of {format_bytes(pool)}")
        _legend_above(axes[0], len(policies))
        memory, strips = axes[len(pools)], list(axes[len(pools) + 1 :])
        _draw_memory(memory, busiest, styles)
        _draw_requests(strips, busiest)
    return figure


def _styles() -> Iterable[dict[str, Any]]:
    for dash in cycle(_DASHES):
        for colour in _COLOURS:
            yield {"color": colour, "linestyle": dash}


def _busiest(played: Sequence[Played]) -> list[Played]:
    """Return a run of each policy, all on the same requests."""
    if not played:
        return []
    load = max(run.load for run, _ in played)
    pool = min(run.kv_memory for run, _ in played)
    of_seed: dict[int, list[Played]] = {}
    for run, result in played:
        if (run.load, run.kv_memory) == (load, pool):
            of_seed.setdefault(run.seed, []).append((run, result))
    return max(of_seed.values(), key=len) if of_seed else []


def _draw_latency(axes: Any, played: Sequence[Played], styles: dict[str, Any]) -> None:
    loads = sorted({run.load for run, _ in played})
    for policy, style in styles.items():
        points = []
        for load in loads:
            found = [
                spread([each.latency_s for each in result.requests if not each.error])
                for run, result in played
                if (run.policy, run.load) == (policy, load)
            ]
            values = [each["p90"] for each in found if each is not None]
            if values:
                points.append((load, min(values), statistics.fmean(values), max(values)))
        if points:
            at, lows, means, highs = zip(*points, strict=True)
            axes.plot(at, means, marker="o", label=policy, **style)
            axes.fill_between(at, lows, highs, color=style["color"], alpha=0.1, linewidth=0)
    axes.set(xlabel="load", ylabel="seconds", ylim=(0, None), xticks=loads)


def _draw_memory(axes: Any, played: Sequence[Played], styles: dict[str, Any]) -> None:
    for run, result in played:
        times, shares = zip(*result.memory, strict=True)
        percent = [100 * share for share in shares]
        axes.step(times, percent, where="post", linewidth=1.2, **styles[run.policy])
    run = played[0][0]
    axes.set(xlabel="time (s)", ylabel="pages in use (%)", ylim=(0, 104))
    axes.set_title(f"memory at load {run.load:g}, KV of {format_bytes(run.kv_memory)}")


def _draw_requests(strips: Sequence[Any], played: Sequence[Played]) -> None:
    """Draw a strip of each policy, in which every request is a line from its arrival to its end."""
    longest = max(result.wall_s for _, result in played)
    for axes, (run, result) in zip(strips, played, strict=True):
        done = [each for each in result.requests if not each.error]
        ends = [(e.arrival_s, e.admitted_s, e.first_token_s, e.finished_s) for e in done]
        for index, colour in enumerate(_PHASES.values()):
            lines = [
                [(times[index], row), (times[index + 1], row)] for row, times in enumerate(ends)
            ]
            axes.add_collection(LineCollection(lines, colors=colour, linewidths=0.8))
        axes.set(xlim=(0, longest), ylim=(len(done), -1), yticks=[])
        axes.set_ylabel(run.policy, rotation=0, ha="right", va="center", color=INK)
        axes.spines["left"].set_visible(False)
        axes.tick_params(labelbottom=axes is strips[-1])
    strips[0].set_title("requests in order of arrival")
    handles = [Patch(color=colour, label=phase) for phase, colour in _PHASES.items()]
    strips[0].legend(handles=handles, **_ABOVE, ncols=len(handles))
    strips[-1].set_xlabel("time (s)")


_ABOVE: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}


def _legend_above(axes: Any, num: int) -> None:
    axes.legend(**_ABOVE, ncols=min(num, 4))
