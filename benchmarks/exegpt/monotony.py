"""Table 5: how many configurations are not monotone in a control variable."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.exegpt.scenarios import PAPER_TABLE_5, Scenario
from benchmarks.exegpt.static_batching import StaticBatches
from jaxserve.planning.schedules import (
    Estimates,
    LatencyBounds,
    Points,
    Policy,
    RRATimeline,
    Timeline,
    WAATimeline,
)
from jaxserve.planning.schedules.candidate import throughput_under
from jaxserve.planning.schedules.search import maximise

_TOLERANCES = (0.02, 0.05, 0.10)
# Values of a variable in the grid, at most.
_MOST_VALUES = 96


def non_monotone_share(values: np.ndarray, counted: np.ndarray, tolerance: float) -> float:
    """Return the share of points that are lower than one before them by more than a tolerance.

    Args:
      values: float [lines, points], each line in the order in which it should rise.
      counted: bool [lines, points], the points that exist; others are left out.
    """
    seen = np.where(counted, values, -np.inf)
    highest = np.maximum.accumulate(seen, axis=1)
    falls = counted & (values < highest - tolerance)
    return float(falls.sum() / max(1, counted.sum()))


def table_5() -> list[dict[str, Any]]:
    """Return the percentages of points, (latency, throughput), by task, tolerance and variable."""
    rows = []
    for task in ("S", "T"):
        scenario = Scenario("GPT3-39B", "A40", 16, task)
        deployment, lengths = scenario.deployment(), scenario.lengths()
        bound_s = StaticBatches.of(deployment, lengths).bounds()[2]
        timelines = {
            "rra": RRATimeline(deployment, lengths),
            "waa": WAATimeline(deployment, lengths),
        }
        for policy, timeline in timelines.items():
            score = throughput_under(LatencyBounds(latency_s=bound_s))
            achieved = maximise([timeline], score).score
            for variable, lines in _lines(timeline, policy).items():
                for tolerance in _TOLERANCES:
                    kinds = (("latency", bound_s), ("throughput", achieved))
                    found = {
                        kind: 100 * non_monotone_share(*lines[kind], tolerance * scale)
                        for kind, scale in kinds
                    }
                    rows.append(
                        {
                            "task": task,
                            "tolerance": tolerance,
                            "policy": policy,
                            "variable": variable,
                            **found,
                            "paper": PAPER_TABLE_5[task, tolerance, policy, variable],
                        }
                    )
    return rows


_Lines = dict[str, tuple[np.ndarray, np.ndarray]]


def _lines(timeline: Timeline, policy: str) -> dict[str, _Lines]:
    """Return latency and throughput along every variable, with all values of the others."""
    layouts = [
        i
        for i, layout in enumerate(timeline.layouts)
        # WAA-C and WAA-M differ in how devices are divided, which is no variable of table 5.
        if layout.policy is not Policy.WAA_M
    ]
    batches = _spread(timeline.max_encode_batch)
    controls = _spread(timeline.max_control)[::-1]
    shape = len(layouts), len(batches), len(controls)
    grid = np.meshgrid(np.array(layouts), batches, controls, indexing="ij")
    figures = _estimated(timeline, Points(*(each.ravel() for each in grid)))
    named = {"latency": figures.latency_s, "throughput": figures.throughput}
    fits = figures.fits.reshape(shape)

    def along(axis: int) -> _Lines:
        return {
            name: (_rows_of(values.reshape(shape), axis), _rows_of(fits, axis))
            for name, values in named.items()
        }

    if policy == "rra":
        return {"B_E": along(1), "N_D": along(2)}
    return {"B_E": along(1), "TP": _along_layouts(timeline, layouts, named, fits), "B_m": along(2)}


def _along_layouts(
    timeline: Timeline, layouts: list[int], named: dict[str, np.ndarray], fits: np.ndarray
) -> _Lines:
    """Return lines of one degree each: from all devices sharded to the fewest."""
    degrees = np.array([timeline.layouts[i].degree for i in layouts])
    lines: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in named}
    for degree in sorted(set(degrees.tolist()) - {1}):
        # Layouts list the fewest sharded devices first.
        chosen = np.flatnonzero(degrees == degree)[::-1]
        for name, values in named.items():
            part = values.reshape(fits.shape)[chosen]
            lines[name].append((_rows_of(part, 0), _rows_of(fits[chosen], 0)))
    return {name: _stacked(parts) for name, parts in lines.items()}


def _stacked(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return lines of several lengths as one array; points that are missing do not count."""
    longest = max(values.shape[1] for values, _ in parts)

    def padded(lines: np.ndarray) -> np.ndarray:
        return np.pad(lines, ((0, 0), (0, longest - lines.shape[1])))

    return (
        np.concatenate([padded(values) for values, _ in parts]),
        np.concatenate([padded(fits) for _, fits in parts]),
    )


def _rows_of(values: np.ndarray, axis: int) -> np.ndarray:
    return np.moveaxis(values, axis, -1).reshape(-1, values.shape[axis])


def _spread(most: int) -> np.ndarray:
    """Return whole numbers from 1 to `most`, all of them or evenly spread ones."""
    return np.unique(np.linspace(1, most, min(most, _MOST_VALUES)).astype(int))


def _estimated(timeline: Timeline, points: Points, *, at_a_time: int = 1 << 14) -> Estimates:
    parts = [timeline.estimate(points[i : i + at_a_time]) for i in range(0, len(points), at_a_time)]
    names = vars(parts[0])
    return Estimates(**{n: np.concatenate([getattr(part, n) for part in parts]) for n in names})
