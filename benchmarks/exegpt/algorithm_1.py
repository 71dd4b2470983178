"""Algorithm 1 of ExeGPT: branch and bound for monotone variables, and where it misses the best."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.planning.schedules.layer_cost import Timeline
from jaxserve.planning.schedules.schedule import Estimates, LatencyBounds, Points
from jaxserve.planning.schedules.search import Incumbent, Score, maximise, throughput_under

# Tolerance of throughput and latency (section 7.8, table 5).
TOLERANCE = 0.05
# Blocks to split at a time: 1 is the paper's algorithm; more share one vectorised computation.
_AT_A_TIME = 32


@final
@dataclass(frozen=True)
class _Space:
    """The configurations of one policy and tensor-parallel degree, as a grid of indices.

    The variables are B_E, the policy's control variable, and the number of tensor-parallel devices.
    Index 0 has the lowest throughput and latency: B_E rises with its index, the other two fall.
    """

    timeline: Timeline
    layouts: np.ndarray

    @classmethod
    def all_of(cls, timeline: Timeline) -> list[_Space]:
        groups: dict[tuple[str, int], list[int]] = {}
        for i, layout in enumerate(timeline.layouts):
            groups.setdefault((layout.policy.value, layout.degree), []).append(i)
        # `layouts_of` lists the fewest tensor-parallel devices first.
        return [cls(timeline, np.array(group[::-1])) for group in groups.values()]

    @property
    def last(self) -> tuple[int, ...]:
        timeline = self.timeline
        return timeline.max_encode_batch - 1, timeline.max_control - 1, len(self.layouts) - 1

    def points(self, indices: Sequence[tuple[int, ...]]) -> Points:
        batch, control, layout = np.array(indices).T
        return Points(self.layouts[layout], batch + 1, self.timeline.max_control - control)


@final
@dataclass(frozen=True, order=True)
class _ConfigurationBlock:
    """A block of configurations; `limit` is the negated throughput of its last corner."""

    limit: float
    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def extents(self) -> list[int]:
        return [high - low for low, high in zip(self.low, self.high, strict=True)]

    def raised(self) -> list[tuple[int, ...]]:
        """Return the corners with one variable at its end and the rest at their start."""
        return [(*self.low[:i], self.high[i], *self.low[i + 1 :]) for i in range(len(self.low))]

    def corners_by(self, which: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        middle = (self.low[which] + self.high[which]) // 2
        upper, lower = list(self.low), list(self.high)
        lower[which], upper[which] = middle, middle + 1
        return [(self.low, tuple(lower)), (tuple(upper), self.high)]


def monotone_search(
    timelines: Sequence[Timeline],
    bounds: LatencyBounds,
    *,
    tolerance: float = TOLERANCE,
    at_a_time: int = _AT_A_TIME,
) -> Incumbent:
    """Return the best configuration that Algorithm 1 finds over all policies and degrees.

    It is the best of all if throughput and latency are monotone in every variable within the
    tolerance. `schedules.search` always finds the best one.

    Args:
      tolerance: share of the bounds by which a block's first corner may miss them, and of the
        throughput by which its last corner may be below the best (epsilon_L, epsilon_T).
    """
    best = Incumbent()
    for timeline in timelines:
        for space in _Space.all_of(timeline):
            best = _BranchAndBound(space, bounds, tolerance, at_a_time).run(best)
    return best


@final
class _BranchAndBound:
    def __init__(self, space: _Space, bounds: LatencyBounds, tolerance: float, at_a_time: int):
        self._space = space
        self._bounds = bounds
        self._widened = LatencyBounds(
            **{name: bound_s * (1 + tolerance) for name, bound_s in bounds.finite().items()}
        )
        self._score: Score = throughput_under(bounds)
        self._tolerance = tolerance
        self._at_a_time = at_a_time

    def run(self, best: Incumbent) -> Incumbent:
        first, last = (0, 0, 0), self._space.last
        figures, best = self._evaluated([first, last], best)
        if not self._widened.met(figures)[0]:
            return best
        if self._bounds.met(figures)[1]:
            return best
        queue = [_ConfigurationBlock(-float(figures.throughput[1]), first, last)]
        while queue:
            blocks = self._popped(queue, best)
            if not blocks:
                break
            halves, best = self._split(blocks, best)
            corners = [corner for half in halves for corner in half]
            figures, best = self._evaluated(corners, best)
            is_worth = self._widened.met(figures)[::2]
            limits = figures.throughput[1::2]
            for (low, high), worth, limit in zip(halves, is_worth, limits, strict=True):
                if worth and low != high:
                    heapq.heappush(queue, _ConfigurationBlock(-float(limit), low, high))
        return best

    def _popped(
        self, queue: list[_ConfigurationBlock], best: Incumbent
    ) -> list[_ConfigurationBlock]:
        """Remove the most promising blocks from the queue; none if all are worse than the best."""
        blocks = []
        while queue and len(blocks) < self._at_a_time:
            block = heapq.heappop(queue)
            if -block.limit + self._tolerance * best.score < best.score:
                queue.clear()
                break
            blocks.append(block)
        return blocks

    def _split(
        self, blocks: list[_ConfigurationBlock], best: Incumbent
    ) -> tuple[list[tuple[tuple[int, ...], tuple[int, ...]]], Incumbent]:
        """Split blocks in two, by the paper's rule (lines 7 to 10).

        The best corner that has one variable raised and keeps the bounds shows which variable to
        raise; the longest other variable is split. Without such a corner the longest of all is
        split.
        """
        corners = [corner for block in blocks for corner in block.raised()]
        figures, best = self._evaluated(corners, best)
        scores = self._score(figures).reshape(len(blocks), -1)
        halves = []
        for block, raised in zip(blocks, scores, strict=True):
            extents = block.extents
            others = list(extents)
            if raised.any():
                others[int(np.argmax(raised))] = 0
            longest = others if any(others) else extents
            halves += block.corners_by(longest.index(max(longest)))
        return halves, best

    def _evaluated(
        self, corners: list[tuple[int, ...]], best: Incumbent
    ) -> tuple[Estimates, Incumbent]:
        points = self._space.points(corners)
        figures = self._space.timeline.estimate(points)
        return figures, best.improved_by(self._space.timeline, points, figures, self._score)


# A throughput below this share of the best is a miss; above it, rounding.
_MISS = 1.0 - 1e-6


@final
@dataclass(frozen=True, kw_only=True)
class Misses:
    """A comparison of Algorithm 1 with the best schedules.

    Attributes:
      num_cases: bounds that some schedule keeps.
      missed_share: of the cases, where Algorithm 1 finds a lower throughput, or none.
      beyond_tolerance_share: of the cases, where it is lower by more than the tolerance.
      num_not_found: cases without a schedule.
      worst_share: lowest throughput found, as a share of the best.
      num_evaluated, num_evaluated_by_bounds: timelines that Algorithm 1 and `search.maximise`
        computed.
    """

    num_cases: int
    missed_share: float
    beyond_tolerance_share: float
    num_not_found: int
    worst_share: float
    num_evaluated: int
    num_evaluated_by_bounds: int


def misses_of(
    cases: Iterable[tuple[Sequence[Timeline], LatencyBounds]], *, tolerance: float = TOLERANCE
) -> Misses:
    """Run Algorithm 1 and the search with sound bounds on every case that has a schedule."""
    shares, num_evaluated, num_by_bounds = [], 0, 0
    for timelines, bounds in cases:
        best = maximise(timelines, throughput_under(bounds))
        if best.found is None:
            continue
        found = monotone_search(timelines, bounds, tolerance=tolerance)
        shares.append(found.score / best.score)
        num_evaluated += found.num_evaluated
        num_by_bounds += best.num_evaluated
    return Misses(
        num_cases=len(shares),
        missed_share=sum(share < _MISS for share in shares) / max(1, len(shares)),
        beyond_tolerance_share=sum(s < 1.0 - tolerance for s in shares) / max(1, len(shares)),
        num_not_found=shares.count(0.0),
        worst_share=min(shares, default=1.0),
        num_evaluated=num_evaluated,
        num_evaluated_by_bounds=num_by_bounds,
    )
