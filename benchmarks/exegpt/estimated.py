"""Figures 10 and 11 and table 5 of the ExeGPT paper, estimated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.exegpt.baselines import StaticBatches
from benchmarks.exegpt.scenarios import PAPER_TABLE_5, Scenario
from jaxserve.planning.schedules import (
    AllocationPolicy,
    Deployment,
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
from jaxserve.planning.schedules.search import FoundConfiguration, maximise, throughput_under
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


def long_tailed(mean: float, std: float, most: int) -> LengthDistribution:
    """Return a log-normal distribution with these moments, cut off to 1 ... `most`."""
    spread = math.log(1 + (std / mean) ** 2)
    centre = math.log(mean) - spread / 2
    tokens = np.arange(1, most + 1)
    weights = np.exp(-((np.log(tokens) - centre) ** 2) / (2 * spread)) / tokens
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
        samples = _sampled(inputs, rng), _sampled(outputs, rng)
        known = TaskLengths(*samples, level=cautious_level(_NUM_PLANNED))
        for model in _MODELS:
            rows += _long_tailed_rows(name, Scenario(*model, task=name), lengths, known)
    return rows


def _sampled(lengths: LengthDistribution, rng: np.random.Generator) -> LengthDistribution:
    drawn = rng.choice(lengths.max_length + 1, _NUM_PLANNED, p=lengths.probabilities)
    return LengthDistribution.of_samples(drawn.tolist())


def _relative_error(known: TaskLengths) -> float:
    """Return the standard error of the mean tokens of a prompt and its answer, over that mean."""
    parts = known.inputs, known.outputs
    variance = sum(each.mean_square - each.mean**2 for each in parts)
    return math.sqrt(variance / _NUM_PLANNED) / sum(each.mean for each in parts)


def _long_tailed_rows(
    name: str, scenario: Scenario, lengths: TaskLengths, known: TaskLengths
) -> list[dict[str, Any]]:
    deployment = scenario.deployment()
    static = StaticBatches.of(deployment, lengths)
    sure = replace(
        deployment.cluster,
        memory_share=deployment.cluster.memory_share * (1 - 2 * _relative_error(known)),
    )
    planned: dict[str, Timeline] = {
        "rra": RRATimeline(replace(deployment, cluster=sure), known),
        "waa": WAATimeline(replace(deployment, cluster=sure), known),
    }
    served: dict[str, Timeline] = {
        "rra": RRATimeline(deployment, lengths),
        "waa": WAATimeline(deployment, lengths, divided_by=known),
    }
    rows = []
    for bound_s in static.bounds()[1::2]:
        row: dict[str, Any] = {
            "data_set": name,
            "model": scenario.model,
            "bound_s": None if math.isinf(bound_s) else bound_s,
            "static_per_s": static.served.best(bound_s),
        }
        kept = []
        for policy, timeline in planned.items():
            score = throughput_under(LatencyBounds(latency_s=bound_s))
            found = maximise([timeline], score).found
            figures = found and served[policy].estimate(found.point)
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

# A timeline for lengths, with the devices divided by other lengths.
_MakeTimeline = Callable[[TaskLengths, TaskLengths], Timeline]


def skewed(lengths: Lengths, skewness: float) -> LengthDistribution:
    """Return a skew-normal distribution over 1 ... `most` with the same mean and deviation.

    Args:
      skewness: of the distribution before it is cut off; between -0.99 and 0.99.
    """
    power = abs(skewness) ** (2 / 3)
    delta = math.sqrt(math.pi / 2 * power / (power + ((4 - math.pi) / 2) ** (2 / 3)))
    shape = math.copysign(delta / math.sqrt(1 - delta**2), skewness)
    tokens = np.arange(1, lengths.most + 1)
    erf = np.vectorize(math.erf)
    centre, width = lengths.mean, lengths.std
    weights = np.ones(lengths.most)
    for _ in range(200):
        z = (tokens - centre) / width
        weights = np.exp(-(z**2) / 2) * (1 + erf(shape * z / math.sqrt(2)))
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
    return [
        row
        for policy, make in _timelines(deployment).items()
        for row in _changed_rows(policy, make, lengths, bounds)
    ]


def _timelines(deployment: Deployment) -> dict[str, _MakeTimeline]:
    return {
        "waa": lambda lengths, by: WAATimeline(deployment, lengths, divided_by=by),
        "rra": lambda lengths, by: RRATimeline(deployment, lengths),
    }


def _changed_rows(
    policy: str, make: _MakeTimeline, lengths: TaskLengths, bounds: list[float]
) -> list[dict[str, Any]]:
    bound_s, found = next(
        (bound_s, found)
        for bound_s in bounds
        if (found := _best(make(lengths, lengths), bound_s)) is not None
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
            anew = _best(make(served, served), bound_s)
            rows.append(
                {
                    "policy": policy,
                    "bound_s": bound_s,
                    "changed": changed,
                    "by": by,
                    "left_alone_per_s": float(left_alone.throughput[0]),
                    "left_alone_latency_s": float(left_alone.latency_s[0]),
                    "left_alone_same_length_s": float(same.latency_s[0]),
                    "left_alone_fits": bool(left_alone.fits[0]),
                    "planned_per_s": anew and float(anew.estimates.throughput[0]),
                    "planned_latency_s": anew and float(anew.estimates.latency_s[0]),
                }
            )
    return rows


def _best(timeline: Timeline, bound_s: float) -> FoundConfiguration | None:
    score = throughput_under(LatencyBounds(latency_s=bound_s))
    return maximise([timeline], score).found


_TOLERANCES = (0.02, 0.05, 0.10)
# Values of a variable in the grid, at most.
_MOST_VALUES = 96


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
    """Return latency and throughput along every variable, with all values of the other ones."""
    layouts = [
        i
        for i, layout in enumerate(timeline.layouts)
        # WAA-C and WAA-M differ in the division of devices, which is not a variable of table 5.
        if layout.policy is not AllocationPolicy.WAA_M
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
    """Return lines of several lengths as one array; missing points do not count."""
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
    """Return whole numbers from 1 to `most`, all of them or evenly spaced ones."""
    return np.unique(np.linspace(1, most, min(most, _MOST_VALUES)).astype(int))


def _estimated(timeline: Timeline, points: Points, *, at_a_time: int = 1 << 14) -> Estimates:
    parts = [timeline.estimate(points[i : i + at_a_time]) for i in range(0, len(points), at_a_time)]
    names = vars(parts[0])
    return Estimates(**{n: np.concatenate([getattr(part, n) for part in parts]) for n in names})
