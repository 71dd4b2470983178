"""The best configuration that a search has found so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import numpy as np

from jaxserve.planning.schedules.configuration import Points
from jaxserve.planning.schedules.estimates import Best, Estimates, LatencyBounds
from jaxserve.planning.schedules.timeline import Timeline

# Rises with throughput and falls with latencies, and is 0 for what cannot be chosen.
Score: TypeAlias = Callable[[Estimates | Best], np.ndarray]


def throughput_under(bounds: LatencyBounds) -> Score:
    """Return a score: the throughput, if the bounds are kept."""
    return lambda figures: np.where(bounds.met(figures), figures.throughput, 0.0)


def shortest(name: str) -> Score:
    """Return a score that is highest for the lowest latency of this name."""
    return lambda figures: np.where(figures.fits, 1.0 / getattr(figures, name), 0.0)


def nearest_to(bounds: LatencyBounds) -> Score:
    """Return a score that is highest where the bound that is missed most is missed least.

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
class Found:
    """A configuration and its figures, each of length 1."""

    timeline: Timeline
    point: Points
    estimates: Estimates


@final
@dataclass(frozen=True, kw_only=True)
class Candidate:
    """The best configuration so far, if any, and how many timelines were computed to find it.

    Attributes:
      score: what is maximised; 0 as long as none is found.
    """

    found: Found | None = None
    score: float = 0.0
    num_evaluated: int = 0

    def counting(self, num: int) -> Candidate:
        """Return this with `num` more evaluated timelines."""
        return replace(self, num_evaluated=self.num_evaluated + num)

    def improved(self, timeline: Timeline, points: Points, score: Score) -> Candidate:
        """Evaluate configurations, and return the best of them if it is better than this."""
        if not len(points):
            return self
        return self.improved_by(timeline, points, timeline.estimate(points), score)

    def improved_by(
        self, timeline: Timeline, points: Points, estimates: Estimates, score: Score
    ) -> Candidate:
        """Return the best of evaluated configurations if it is better than this."""
        counted = self.counting(len(points))
        scores = score(estimates)
        first = int(np.argmax(scores))
        if scores[first] <= self.score:
            return counted
        one = slice(first, first + 1)
        found = Found(timeline=timeline, point=points[one], estimates=estimates[one])
        return replace(counted, found=found, score=float(scores[first]))
