"""The schedule with the highest throughput under latency bounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import numpy as np

from jaxserve.core.errors import DeviceMemoryError, InfeasibleBoundError
from jaxserve.planning.schedules.continuous import ContinuousTimeline
from jaxserve.planning.schedules.layer_cost import Boxes, Deployment, Timeline
from jaxserve.planning.schedules.lengths import TaskLengths
from jaxserve.planning.schedules.rra import RRATimeline
from jaxserve.planning.schedules.schedule import (
    Best,
    Estimates,
    LatencyBounds,
    Points,
    Schedule,
    check_families,
)
from jaxserve.planning.schedules.waa import WAATimeline

# Rises with throughput, falls with latencies, and is 0 for configurations that are not allowed.
Score: TypeAlias = Callable[[Estimates | Best], np.ndarray]


def throughput_under(bounds: LatencyBounds) -> Score:
    return lambda figures: np.where(bounds.met(figures), figures.throughput, 0.0)


def shortest(name: str) -> Score:
    return lambda figures: np.where(figures.fits, 1.0 / getattr(figures, name), 0.0)


def nearest_to(bounds: LatencyBounds) -> Score:
    """Return a score that is highest where the most missed bound is missed least.

    Without any bound it is highest for the lowest latency_s.
    """

    def score(figures: Estimates | Best) -> np.ndarray:
        shares = [getattr(figures, name) / bound for name, bound in bounds.finite().items()]
        worst = np.max([*shares, figures.own_share], axis=0)
        return np.where(figures.fits, 1.0 / np.where(worst > 0, worst, figures.latency_s), 0.0)

    return score


def shortest_with(bounds: LatencyBounds, throughput: float) -> Score:
    """Return a score that is highest for the lowest latency_s, with at least a throughput."""

    def score(figures: Estimates | Best) -> np.ndarray:
        is_enough = bounds.met(figures) & (figures.throughput >= throughput)
        return np.where(is_enough, 1.0 / figures.latency_s, 0.0)

    return score


@final
@dataclass(frozen=True, kw_only=True)
class FoundConfiguration:
    timeline: Timeline
    point: Points
    estimates: Estimates


@final
@dataclass(frozen=True, kw_only=True)
class Incumbent:
    """The best configuration so far with its score (0 without one), and the search's effort."""

    found: FoundConfiguration | None = None
    score: float = 0.0
    num_evaluated: int = 0

    def counting(self, num: int) -> Incumbent:
        return replace(self, num_evaluated=self.num_evaluated + num)

    def improved(self, timeline: Timeline, points: Points, score: Score) -> Incumbent:
        """Evaluate configurations, and return the best of them if it is better than this."""
        if not len(points):
            return self
        return self.improved_by(timeline, points, timeline.estimate(points), score)

    def improved_by(
        self, timeline: Timeline, points: Points, estimates: Estimates, score: Score
    ) -> Incumbent:
        counted = self.counting(len(points))
        scores = score(estimates)
        first = int(np.argmax(scores))
        if scores[first] <= self.score:
            return counted
        one = slice(first, first + 1)
        found = FoundConfiguration(timeline=timeline, point=points[one], estimates=estimates[one])
        return replace(counted, found=found, score=float(scores[first]))


# Boxes to examine at a time, the most promising first.
_WAVE = 128
# Boxes of these in which a configuration is tried.
_PROBES = 8
# Families of schedules on a cluster.
CLUSTER_FAMILIES = ("rra", "waa", "continuous")
# A score counts as better above this ratio; sums differ by rounding.
_BETTER = 1.0 + 1e-9


@final
@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """A schedule, its expected figures, and the effort of the search.

    Attributes:
      estimates: of this schedule, each a scalar.
      num_points: configurations that the search covered.
      num_evaluated: timelines that it computed, of configurations and of boxes.
      elapsed_s: seconds of the search, timelines' tables included.
    """

    schedule: Schedule
    estimates: Estimates
    num_points: int
    num_evaluated: int
    elapsed_s: float


def timelines_of(
    deployment: Deployment, lengths: TaskLengths, families: Sequence[str] = CLUSTER_FAMILIES
) -> tuple[Timeline, ...]:
    """Return the timelines of some families, as far as the cluster allows them.

    WAA needs two stages.

    Raises:
      InvalidConfigError: there is no family, or one is unknown.
    """
    check_families(families, CLUSTER_FAMILIES)
    makers: dict[str, Callable[[Deployment, TaskLengths], Timeline]] = {
        "rra": RRATimeline,
        "waa": WAATimeline,
        "continuous": ContinuousTimeline,
    }
    timelines = [make(deployment, lengths) for name, make in makers.items() if name in families]
    return tuple(timeline for timeline in timelines if timeline.layouts)


def search(
    deployment: Deployment,
    lengths: TaskLengths,
    bounds: LatencyBounds,
    *,
    families: Sequence[str] = CLUSTER_FAMILIES,
) -> SearchResult:
    """Return the schedule with the highest throughput under the bounds.

    The policies are RRA, WAA-C, WAA-M and continuous batching, as far as `families` has them. Of
    equal schedules it is that with the lowest latency. The search never drops a box of
    configurations that could hold a better one, even if throughput and latency are not monotone in
    the control variables; the costs must be, see `LayerCost`.

    Raises:
      InfeasibleBoundError: no schedule keeps the bounds.
      DeviceMemoryError: no schedule fits in memory.
    """
    began_s = time.perf_counter()
    timelines = timelines_of(deployment, lengths, families)
    return search_among(timelines, bounds, began_s=began_s)


def search_among(
    timelines: Sequence[Timeline], bounds: LatencyBounds, *, began_s: float | None = None
) -> SearchResult:
    """Return the schedule of some timelines with the highest throughput; see `search`."""
    began_s = time.perf_counter() if began_s is None else began_s
    most = maximise(timelines, throughput_under(bounds))
    if most.found is None:
        raise _infeasible(timelines, bounds)
    best = maximise(timelines, shortest_with(bounds, most.score / _BETTER))
    return _choice(timelines, best, most.num_evaluated, began_s)


def _choice(
    timelines: Sequence[Timeline], best: Incumbent, num_before: int, began_s: float
) -> SearchResult:
    assert best.found is not None, "the caller has found one"
    return SearchResult(
        schedule=best.found.timeline.schedule(best.found.point),
        estimates=best.found.estimates[0],
        num_points=sum(int(timeline.boxes().num_points.sum()) for timeline in timelines),
        num_evaluated=num_before + best.num_evaluated,
        elapsed_s=time.perf_counter() - began_s,
    )


def maximise(timelines: Sequence[Timeline], score: Score) -> Incumbent:
    """Return the configuration with the highest score, up to rounding."""
    best, descents = Incumbent(), []
    for timeline in timelines:
        descents.append(_Descent(timeline, score, best))
        best = descents[-1].best
    # The most promising boxes of all timelines come first.
    while descents:
        most = max(descents, key=_Descent.most)
        if most.most() <= best.score * _BETTER:
            break
        best = most.advance(best)
    return best


@final
class _Descent:
    def __init__(self, timeline: Timeline, score: Score, best: Incumbent):
        self._timeline, self._score = timeline, score
        self._boxes = timeline.boxes()
        self._limits, self.best = self._limits_of(self._boxes, best)

    def most(self) -> float:
        """Return the highest possible score of an open box; 0 without any."""
        return float(self._limits.max(initial=0.0))

    def advance(self, best: Incumbent) -> Incumbent:
        """Halve the most promising boxes, and return the best configuration so far."""
        order = np.argsort(-self._limits, kind="stable")
        order = order[: np.searchsorted(-self._limits[order], -best.score * _BETTER)]
        now, later = self._boxes[order[:_WAVE]], self._boxes[order[_WAVE:]]
        later_limits = self._limits[order[_WAVE:]]
        # A configuration amid the most promising boxes may rule out other boxes.
        best = best.improved(self._timeline, _amid(now[:_PROBES]), self._score)
        halves = _halves(now)
        is_point = halves.num_points == 1
        best = best.improved(self._timeline, halves.low[is_point], self._score)
        halves = halves[~is_point]
        limits, best = self._limits_of(halves, best)
        self._boxes = _joined(halves, later)
        self._limits = np.concatenate([limits, later_limits])
        return best

    def _limits_of(self, boxes: Boxes, best: Incumbent) -> tuple[np.ndarray, Incumbent]:
        """Return the highest possible score of each box; count the boxes as evaluated."""
        if not len(boxes):
            return np.zeros(0), best
        return self._score(self._timeline.bound(boxes)), best.counting(len(boxes))


def _amid(boxes: Boxes) -> Points:
    low, high = boxes.low, boxes.high
    return Points(
        low.layout,
        np.sqrt(low.encode_batch * high.encode_batch).astype(int),
        np.sqrt(low.control * high.control).astype(int),
    )


def _halves(boxes: Boxes) -> Boxes:
    """Split boxes along the variable with the largest ratio of its ends; single points stay."""
    low, high = boxes.low, boxes.high
    by_batch = high.encode_batch * low.control >= high.control * low.encode_batch
    batch = np.sqrt(low.encode_batch * high.encode_batch).astype(int)
    control = np.sqrt(low.control * high.control).astype(int)
    lower = Points(
        low.layout,
        np.where(by_batch, batch, high.encode_batch),
        np.where(by_batch, high.control, control),
    )
    upper = Points(
        low.layout,
        np.where(by_batch, batch + 1, low.encode_batch),
        np.where(by_batch, low.control, control + 1),
    )
    halves = _joined(Boxes(low, lower), Boxes(upper, high))
    return halves[halves.num_points > 0]


def _joined(first: Boxes, second: Boxes) -> Boxes:
    def both(one: Points, other: Points) -> Points:
        return Points(
            np.concatenate([one.layout, other.layout]),
            np.concatenate([one.encode_batch, other.encode_batch]),
            np.concatenate([one.control, other.control]),
        )

    return Boxes(both(first.low, second.low), both(first.high, second.high))


def _infeasible(
    timelines: Sequence[Timeline], bounds: LatencyBounds
) -> InfeasibleBoundError | DeviceMemoryError:
    lowest: dict[str, float] = {}
    for name in bounds.finite() or ("latency_s",):
        best = maximise(timelines, shortest(name))
        if best.found is None:
            return DeviceMemoryError(
                "no schedule fits in the memory of the cluster; pass more devices, or devices "
                "with more memory"
            )
        lowest[name] = 1.0 / best.score
    return InfeasibleBoundError(bounds.finite(), lowest)
