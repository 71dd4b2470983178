"""Figures 10 and 11 and table 5 of the ExeGPT paper, estimated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.stats import lognorm, skewnorm

from benchmarks.exegpt.baselines import StaticBatches
from benchmarks.exegpt.discrete import or_none
from benchmarks.exegpt.scenarios import PAPER_TABLE_5, Scenario
from jaxserve.planning.schedules import (
    AllocationPolicy,
    Estimates,
    LatencyBounds,
    LengthDistribution,
    Points,
    RRATimeline,
    TaskLengths,
    Timeline,
    WAATimeline,
)
from jaxserve.planning.schedules.lengths import cautious_level
from jaxserve.planning.schedules.search import Incumbent, maximise, throughput_under
from jaxserve.workload.tasks import TASKS, Lengths

# (mean, deviation, maximum) of inputs and outputs, in tokens: log-normal stand-ins. Articles and
# summaries of CNN/DailyMail have 781 and 56 tokens on average (See et al., 2017); the other figures
# are assumed, with outputs of Alpaca the longest, as section 7.5 says.
DATA_SETS = {
    "WMT": ((28, 16, 160), (30, 18, 200)),
    "Alpaca": ((50, 30, 320), (90, 90, 640)),
    "CNN": ((781, 380, 2048), (56, 24, 250)),
}
# Lengths from which a schedule is planned, a tenth of as many as the schedule then serves.
_NUM_PLANNED = 1000
_SEED = 0
_MODELS = (("OPT-13B", "A40", 4), ("GPT3-39B", "A40", 16))


def _best(timeline: Timeline, bound_s: float) -> Incumbent:
    return maximise([timeline], throughput_under(LatencyBounds(latency_s=bound_s)))


def long_tailed(mean: float, std: float, most: int) -> LengthDistribution:
    """Return a log-normal distribution with these moments, cut off to 1 ... `most`."""
    spread = math.log(1 + (std / mean) ** 2)
    median = mean * math.exp(-spread / 2)
    weights = lognorm.pdf(np.arange(1, most + 1), math.sqrt(spread), scale=median)
    return LengthDistribution(np.concatenate([[0.0], weights]))


def figure_10() -> list[dict[str, Any]]:
    """Return FasterTransformer and the faster of RRA and WAA, by model, data set and bound.

    The bounds are the bottom 30 % of FasterTransformer's latencies, and none. A schedule is chosen
    by sampled lengths, with a cautious level, and with memory reduced by twice the relative error
    of their mean. Its figures are those for the whole distribution. A schedule that then misses the
    bound or exceeds the memory does not count in the gain.
    """
    rows = []
    for name, moments in DATA_SETS.items():
        inputs, outputs = (long_tailed(*each) for each in moments)
        lengths = TaskLengths(inputs, outputs)
        rng = np.random.default_rng(_SEED)
        samples = [
            rng.choice(each.max_length + 1, _NUM_PLANNED, p=each.probabilities).tolist()
            for each in (inputs, outputs)
        ]
        inputs, outputs = map(LengthDistribution.of_samples, samples)
        known = TaskLengths(inputs, outputs, level=cautious_level(_NUM_PLANNED))
        for model in _MODELS:
            rows += _long_tailed_rows(name, Scenario(*model, task=name), lengths, known)
    return rows


def _long_tailed_rows(
    name: str, scenario: Scenario, lengths: TaskLengths, known: TaskLengths
) -> list[dict[str, Any]]:
    deployment = scenario.deployment()
    static = StaticBatches.of(deployment, lengths)
    parts = known.inputs, known.outputs
    # The standard error of the mean tokens of a prompt and its answer, over that mean.
    variance = sum(each.mean_square - each.mean**2 for each in parts)
    error = math.sqrt(variance / _NUM_PLANNED) / sum(each.mean for each in parts)
    cluster = deployment.cluster
    sure = replace(cluster, memory_share=cluster.memory_share * (1 - 2 * error))
    cautious = replace(deployment, cluster=sure)
    timelines: dict[str, tuple[Timeline, Timeline]] = {
        "rra": (RRATimeline(cautious, known), RRATimeline(deployment, lengths)),
        "waa": (WAATimeline(cautious, known), WAATimeline(deployment, lengths, divided_by=known)),
    }
    rows = []
    for bound_s in static.bounds()[1::2]:
        row: dict[str, Any] = {
            "data_set": name,
            "model": scenario.model,
            "bound_s": or_none(bound_s),
            "static_per_s": static.served.best(bound_s),
        }
        kept = []
        for policy, (planned, served) in timelines.items():
            found = _best(planned, bound_s).found
            figures = found and served.estimate(found.point)
            row[f"{policy}_per_s"] = figures and float(figures.throughput[0])
            row[f"{policy}_latency_s"] = figures and float(figures.latency_s[0])
            row[f"{policy}_fits"] = figures and bool(figures.fits[0])
            if figures and figures.fits[0] and figures.latency_s[0] <= bound_s:
                kept.append(float(figures.throughput[0]))
        rows.append(row | {"gain": max(kept, default=0.0) / row["static_per_s"]})
    return rows


# Section 7.6: the translation task on OPT 13B and four A40.
SCENARIO = Scenario("OPT-13B", "A40", 4, "T")
_FACTORS = (0.7, 0.85, 1.0, 1.15, 1.3)
_SKEWNESSES = (-0.4, -0.2, 0.0, 0.2, 0.4)


def skewed(lengths: Lengths, skewness: float) -> LengthDistribution:
    """Return a skew-normal distribution over 1 ... `most` with the same mean and deviation.

    Args:
      skewness: of the distribution before it is cut off; between -0.99 and 0.99.
    """
    power = abs(skewness) ** (2 / 3)
    delta = math.sqrt(math.pi / 2 * power / (power + ((4 - math.pi) / 2) ** (2 / 3)))
    shape = math.copysign(delta / math.sqrt(1 - delta**2), skewness)
    tokens = np.arange(1, lengths.most + 1)
    centre, width = lengths.mean, lengths.std
    weights = np.ones(lengths.most)
    for _ in range(200):
        weights = skewnorm.pdf(tokens, shape, centre, width)
        weights /= weights.sum()
        mean = weights @ tokens
        std = math.sqrt(weights @ (tokens - mean) ** 2)
        centre += lengths.mean - mean
        width *= lengths.std / std
    return LengthDistribution(np.concatenate([[0.0], weights]))


def changed_outputs() -> dict[str, list[tuple[float, LengthDistribution]]]:
    """Return the distributions of figures 11a, 11b and 11c, with the change of each."""
    outputs = TASKS[SCENARIO.task].outputs
    of = LengthDistribution.of_task
    return {
        "mean": [(f, of(replace(outputs, mean=f * outputs.mean))) for f in _FACTORS],
        "deviation": [(f, of(replace(outputs, std=f * outputs.std))) for f in _FACTORS],
        "skewness": [(each, skewed(outputs, each)) for each in _SKEWNESSES],
    }


def figure_11() -> list[dict[str, Any]]:
    """Return every bar and line of figure 11, for WAA and for RRA.

    The bound is the lowest of the bottom 10, 30 and 70 % of FasterTransformer's latencies that a
    policy keeps, from 30 % on; the paper's is 30 %.
    """
    deployment, lengths = SCENARIO.deployment(), SCENARIO.lengths()
    bounds = StaticBatches.of(deployment, lengths).bounds()[1:]
    # A timeline for lengths, with the devices divided by other lengths.
    timelines: dict[str, Callable[[TaskLengths, TaskLengths], Timeline]] = {
        "waa": lambda lengths, by: WAATimeline(deployment, lengths, divided_by=by),
        "rra": lambda lengths, by: RRATimeline(deployment, lengths),
    }
    return [
        row
        for policy, make in timelines.items()
        for row in _changed_rows(policy, make, lengths, bounds)
    ]


def _changed_rows(
    policy: str,
    make: Callable[[TaskLengths, TaskLengths], Timeline],
    lengths: TaskLengths,
    bounds: Sequence[float],
) -> list[dict[str, Any]]:
    bound_s, found = next(
        (bound_s, found)
        for bound_s in bounds
        if (found := _best(make(lengths, lengths), bound_s).found) is not None
    )
    longest = lengths.outputs.percentile(lengths.level)
    rows = []
    for changed, each in changed_outputs().items():
        for by, outputs in each:
            served = replace(lengths, outputs=outputs)
            left_alone = make(served, lengths).estimate(found.point)
            # A sequence of the length for which the schedule was planned (SLA-b).
            share = float(np.cumsum(outputs.probabilities)[: longest + 1][-1])
            same = make(replace(served, level=share), lengths).estimate(found.point)
            anew = _best(make(served, served), bound_s).found
            rows.append(
                {
                    "policy": policy,
                    "bound_s": bound_s,
                    "changed": changed,
                    "by": by,
                    "left_alone_per_s": float(left_alone.throughput[0]),
                    "left_alone_latency_s": float(left_alone.latency_s[0]),
                    "left_alone_same_length_s": float(same.latency_s[0]),
                    "planned_per_s": anew and float(anew.estimates.throughput[0]),
                    "planned_latency_s": anew and float(anew.estimates.latency_s[0]),
                }
            )
    return rows


_TOLERANCES = (0.02, 0.05, 0.10)
# Values of a variable in the grid, at most.
_MOST_VALUES = 96
_POINTS_AT_A_TIME = 1 << 14
# Variables of table 5, and their axes in the grid of layouts, batches and controls.
_VARIABLES = {"rra": {"B_E": 1, "N_D": 2}, "waa": {"B_E": 1, "TP": 0, "B_m": 2}}


def non_monotone_share(values: np.ndarray, counted: np.ndarray, tolerance: float) -> float:
    """Return the share of points that are lower than an earlier one by more than a tolerance.

    Args:
      values: float [lines, points], each line in the order in which it should rise.
      counted: bool [lines, points], whether a point exists.
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
        for policy, kind in (("rra", RRATimeline), ("waa", WAATimeline)):
            timeline = kind(deployment, lengths)
            scales = {"latency": bound_s, "throughput": _best(timeline, bound_s).score}
            named, fits, layouts = _grid(timeline)
            for variable, axis in _VARIABLES[policy].items():
                lines = {
                    figure: _lines(timeline, layouts, axis, values, fits)
                    for figure, values in named.items()
                }
                for tolerance in _TOLERANCES:
                    found = {
                        figure: 100 * non_monotone_share(*lines[figure], tolerance * scale)
                        for figure, scale in scales.items()
                    }
                    about = {"task": task, "tolerance": tolerance, "policy": policy}
                    paper = PAPER_TABLE_5[task, tolerance, policy, variable]
                    rows.append({**about, "variable": variable, **found, "paper": paper})
    return rows


def _grid(timeline: Timeline) -> tuple[Mapping[str, np.ndarray], np.ndarray, list[int]]:
    """Return latency and throughput of evenly spaced configurations, and which of them fit.

    All are [layouts, batches, controls]; the layouts' positions are returned, too.
    """
    layouts = [
        i
        for i, layout in enumerate(timeline.layouts)
        # WAA-C and WAA-M differ in the division of devices, which is not a variable of table 5.
        if layout.policy is not AllocationPolicy.WAA_M
    ]
    batches, controls = (
        np.unique(np.linspace(1, most, min(most, _MOST_VALUES)).astype(int))
        for most in (timeline.max_encode_batch, timeline.max_control)
    )
    grid = np.meshgrid(np.array(layouts), batches, controls[::-1], indexing="ij")
    points, size = Points(*(each.ravel() for each in grid)), _POINTS_AT_A_TIME
    parts: list[Estimates] = [
        timeline.estimate(points[i : i + size]) for i in range(0, len(points), size)
    ]
    latency, throughput, fits = (
        np.concatenate([getattr(part, name) for part in parts]).reshape(grid[0].shape)
        for name in ("latency_s", "throughput", "fits")
    )
    return {"latency": latency, "throughput": throughput}, fits, layouts


def _lines(
    timeline: Timeline, layouts: list[int], axis: int, values: np.ndarray, fits: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return a figure along an axis, and whether points fit, with all values of the other axes.

    Lines over layouts are those of one degree each: from all devices sharded to the fewest.
    Missing points of shorter lines do not count.
    """
    groups = [np.arange(len(layouts))]
    if axis == 0:
        degrees = np.array([timeline.layouts[i].degree for i in layouts])
        # Layouts list the fewest sharded devices first.
        groups = [np.flatnonzero(degrees == d)[::-1] for d in sorted({*degrees.tolist()} - {1})]

    def rows_of(grid: np.ndarray) -> np.ndarray:
        lines = [np.moveaxis(grid[each], axis, -1) for each in groups]
        longest = max(each.shape[-1] for each in lines)
        flat = [each.reshape(-1, each.shape[-1]) for each in lines]
        return np.concatenate([np.pad(x, ((0, 0), (0, longest - x.shape[1]))) for x in flat])

    return rows_of(values), rows_of(fits)
