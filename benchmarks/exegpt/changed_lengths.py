"""Figure 11: a schedule under changed output lengths, left alone and planned anew, estimated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.exegpt.scenarios import Scenario
from benchmarks.exegpt.static_batching import StaticBatches
from jaxserve.planning.schedules import (
    Deployment,
    LatencyBounds,
    LengthDistribution,
    RRATimeline,
    TaskLengths,
    Timeline,
    WAATimeline,
)
from jaxserve.planning.schedules.candidate import Found, throughput_under
from jaxserve.planning.schedules.search import maximise
from jaxserve.workload.tasks import TASKS, Lengths

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
    """Return the distributions of figures 11a, 11b and 11c, with what was changed by how much."""
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
        for row in _rows(policy, make, lengths, bounds)
    ]


def _timelines(deployment: Deployment) -> dict[str, _MakeTimeline]:
    return {
        "waa": lambda lengths, by: WAATimeline(deployment, lengths, divided_by=by),
        "rra": lambda lengths, by: RRATimeline(deployment, lengths),
    }


def _rows(
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


def _best(timeline: Timeline, bound_s: float) -> Found | None:
    score = throughput_under(LatencyBounds(latency_s=bound_s))
    return maximise([timeline], score).found
