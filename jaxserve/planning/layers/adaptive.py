"""Points of curves, chosen so that few lie where a curve is straight."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Range:
    """A curve to measure: its name, and the whole numbers at its ends."""

    name: str
    low: int
    high: int


def sample(
    ranges: Sequence[Range],
    measure: Callable[[str, int], float],
    *,
    tolerance: float,
    least: float = 0.0,
    ratio: float = 1.5,
    goes_on: Callable[[], bool] = lambda: True,
) -> dict[str, dict[int, float]]:
    """Measure curves until linear interpolation between their points is within a tolerance.

    First come the ends of all curves, and the middle of each. Where the middle of two points, on a
    logarithmic scale, is off the line between them by more than the tolerance, both halves get
    their middles; the curve with the largest error so far is first. So a straight curve has three
    points. The order depends on measured values alone, so that it repeats itself if those are
    known already.

    Args:
      measure: returns the value of a curve at a point.
      tolerance: allowed error, as a share of the measured value.
      least: values below this count as this in that share, so that noise of small values does not.
      ratio: points this close to each other, as a quotient, have no middle.
      goes_on: whether there is time for one more middle. Ends are measured in any case.

    Returns:
      Values by point, for each curve.
    """
    found: dict[str, dict[int, float]] = {}
    for each in ranges:
        ends = sorted({each.low, each.high})
        found[each.name] = {at: measure(each.name, at) for at in ends}
    # (negative error of the interval's parent, order of entry, curve, ends)
    waiting: list[tuple[float, int, str, int, int]] = []
    num_entered = 0

    def enter(error: float, name: str, low: int, high: int) -> None:
        nonlocal num_entered
        if middle(low, high, ratio) is not None:
            heapq.heappush(waiting, (-error, num_entered, name, low, high))
            num_entered += 1

    for each in ranges:
        enter(math.inf, each.name, each.low, each.high)
    while waiting and goes_on():
        _, _, name, low, high = heapq.heappop(waiting)
        at, points = middle(low, high, ratio), found[name]
        assert at is not None  # only such intervals are entered
        points[at] = value = measure(name, at)
        line = points[low] + (points[high] - points[low]) * (at - low) / (high - low)
        scale = max(abs(value), least)
        error = abs(value - line) / scale if scale else 0.0
        if error > tolerance:
            enter(error, name, low, at)
            enter(error, name, at, high)
    return {name: dict(sorted(points.items())) for name, points in found.items()}


def middle(low: int, high: int, ratio: float) -> int | None:
    """Return the whole number nearest to the geometric mean; None if the two are too close."""
    at = round(math.sqrt(low * high))
    return at if low < at < high and high / low >= ratio else None
