"""What the ExeGPT paper says of its figures 6, 8 and 11 in words, beside the same of a result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import mean
from typing import Any

from benchmarks.figures.markdown import linked, table
from benchmarks.figures.results import Result

_STATIC = "fastertransformer"
_Point = dict[str, Any]


def in_words(result: Result, link: str) -> str:
    """Return a row for each figure that the paper gives in its text; "" without points."""
    points = [point for _, point in result.items("points")]
    rows = [*_gains(points, link), *_margins(result, link), *_changes(result, link)]
    return table(("paper, in words", "paper", "plan", "RRA and WAA", "RRA"), rows) if rows else ""


def _gains(points: Sequence[_Point], link: str) -> Iterator[list[str]]:
    """Yield gains over FasterTransformer: of figure 6 the largest, of figure 8 all (section 7)."""
    sixth = [point for point in points if point["figure"] == 6]
    eighth = [point for point in points if point["figure"] == 8]
    unbounded = [point for point in eighth if point["bound_s"] is None]
    for named, paper, own, of in (
        ("figure 6, largest gain", "5.4", sixth, max),
        ("figure 8, least gain", "1.1", eighth, min),
        ("figure 8, largest gain", "15.2", eighth, max),
        ("figure 8, mean gain", "3.2", eighth, mean),
        ("figure 8 without a bound, mean gain", "2.2", unbounded, mean),
    ):
        cells = [_of(own, kind, of, link) for kind in (_plan, _own, _rra)]
        if any(cells):
            yield [named, paper, *cells]


def _of(
    points: Sequence[_Point],
    throughput: Callable[[_Point], float | None],
    of: Callable[[list[float]], float],
    link: str,
) -> str:
    gains = [
        own / point["per_s_of"][_STATIC]
        for point in points
        if (own := throughput(point)) and point["per_s_of"].get(_STATIC)
    ]
    return linked(of(gains), ".2f", link) if gains else ""


def _plan(point: _Point) -> float | None:
    return point.get("per_s")


def _own(point: _Point) -> float | None:
    return point.get("exegpt_per_s")


def _rra(point: _Point) -> float | None:
    return point["per_s_of"].get("rra")


def _margins(result: Result, link: str) -> Iterator[list[str]]:
    """Yield by how much a p99 latency grows if lengths change and the schedule of WAA does not.

    That is the tighter bound under which the schedule has to be found (section 7.6): of all answers
    (SLA a), and of answers as long as before (SLA b).
    """
    rows = {
        (row["changed"], row["by"]): row
        for _, row in result.items("figure_11")
        if row["policy"] == "waa"
    }
    for changed, by, papers in (("mean", 1.15, ("13%", "10%")), ("deviation", 1.3, ("5%", "0%"))):
        after, before = rows.get((changed, by)), rows.get((changed, 1.0))
        if after is None or before is None:
            continue
        for sla, key, paper in zip(
            ("a", "b"), ("left_alone_latency_s", "left_alone_same_length_s"), papers, strict=True
        ):
            margin = after[key] / before[key] - 1
            named = f"figure 11, WAA, {changed} times {by:g}: tighter bound, SLA {sla}"
            yield [named, paper, "", linked(margin, ".0%", link), ""]


def _changes(result: Result, link: str) -> Iterator[list[str]]:
    """Yield how far RRA's unchanged schedule is from the one planned anew, at most."""
    rows = [row for _, row in result.items("figure_11") if row["policy"] == "rra"]
    mean_rows = [row for row in rows if row["changed"] == "mean"]
    others = [row for row in rows if row["changed"] != "mean"]
    for named, own, papers in (
        ("mean", mean_rows, ("28%", "12.6%")),
        ("others", others, ("11%", "17%")),
    ):
        for what, keys, paper in zip(
            ("throughput", "p99"),
            (("left_alone_per_s", "planned_per_s"), ("left_alone_latency_s", "planned_latency_s")),
            papers,
            strict=True,
        ):
            found = [
                abs(row[keys[0]] / row[keys[1]] - 1)
                for row in own
                if row.get(keys[1]) and math.isfinite(row[keys[1]])
            ]
            if found:
                at = f"figure 11, RRA, {named}: {what} of the unchanged schedule off by at most"
                yield [at, f"under {paper}", "", "", linked(max(found), ".0%", link)]
