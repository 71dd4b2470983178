"""Measurement of a layer's parts: which points, in which order, for how long."""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol, final

from tqdm import tqdm

from jaxserve.planning.layers import profile as parts
from jaxserve.planning.layers.profile import (
    LayerProfile,
    LayerSizes,
    Range,
    batch_curve,
    batch_parts,
    curve,
    ranges_of,
)

_log = logging.getLogger(__name__)


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

    The ends of all curves come first, and then the middle of each. Where the middle of two points,
    on a logarithmic scale, is off the line between them by more than the tolerance, both halves get
    a middle, the curve with the largest error first. So a straight curve has three points. The
    order depends only on measured values, so a resumed measurement repeats it.

    Args:
      measure: returns the value of a curve at a point.
      tolerance: allowed error, as a share of the measured value.
      least: smaller values count as this in that share, so that their noise adds no points.
      ratio: two points whose quotient is below this get no middle.
      goes_on: returns whether there is time for another middle. Ends are measured in any case.

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
        assert at is not None  # only intervals with a middle are entered
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


TOLERANCE = 0.1
BUDGET_S = 75.0
# Share of a degree's time for its curves over tokens and batches; the rest is for lengths.
_FIRST_SHARE = 0.6


class LayerTimer(Protocol):
    """A timer of a layer's parts, for tensor-parallel `degrees` on a machine of `num_devices`."""

    @property
    def sizes(self) -> LayerSizes: ...

    @property
    def degrees(self) -> Sequence[int]: ...

    @property
    def num_devices(self) -> int: ...

    def seconds(self, part: str, degree: int, at: int) -> float:
        """Return the seconds of a part, one of the names in `layers.profile`."""
        ...

    def batch_s(self, part: str, degree: int, batch: int, length: int) -> float:
        """Return the seconds of a decoding batch of one length, in a part of `batch_parts`."""
        ...


def measure_layers(
    timer: LayerTimer,
    profile: LayerProfile,
    *,
    tolerance: float = TOLERANCE,
    budget_s: float = BUDGET_S,
    progress: bool = True,
    now: Callable[[], float] = time.monotonic,
) -> LayerProfile:
    """Measure what `profile` lacks, and save it after every point.

    An interrupted measurement continues from the saved points. Each degree in turn gets its share
    of the remaining time: the ends and middles of its curves are always measured, further points
    where curves bend. A degree for which no time is left is not begun; then the profile is
    incomplete, and the next call continues.

    Args:
      timer: times the profile's model on its devices.
      tolerance: error of linear interpolation above which a curve gets more points.
      budget_s: seconds for all degrees together.
      progress: show a bar on stderr.
    """
    begun_s = now()
    with tqdm(
        desc="timing layers", unit=" points", leave=False, disable=not progress, delay=1
    ) as bar:
        measurement = _Measurement(timer, profile, bar)
        for degree in timer.degrees:
            measurement.expect(_ranges(timer, degree, profile))
        for i, degree in enumerate(timer.degrees):
            left_s = begun_s + budget_s - now()
            if left_s <= 0 and i > 0 and not profile.has(degree):
                _log.warning(
                    "no time is left to time layers on %d devices; measure again to go on", degree
                )
                return profile
            share_s = max(0.0, left_s) / (len(timer.degrees) - i)
            _measure_degree(timer, degree, measurement, profile, tolerance, share_s, now)
    profile.end()
    return profile


def _measure_degree(
    timer: LayerTimer,
    degree: int,
    measurement: _Measurement,
    profile: LayerProfile,
    tolerance: float,
    budget_s: float,
    now: Callable[[], float],
) -> None:
    begun_s = now()
    # A layer's cheapest pass: times that are small compared with it need no accuracy.
    least_s = measurement.seconds(curve(parts.REST, degree), 1)

    def goes_on(share: float) -> bool:
        return measurement.is_known or now() - begun_s < share * budget_s

    found = sample(
        _ranges(timer, degree, profile),
        measurement.seconds,
        tolerance=tolerance,
        least=least_s,
        goes_on=lambda: goes_on(_FIRST_SHARE),
    )
    batches = [
        Range(batch_curve(part, batch, degree), 1, timer.sizes.max_length)
        for part in batch_parts(has_encoder=profile.has_encoder)
        for batch in found[curve(part, degree)]
    ]
    measurement.expect(batches)
    sample(
        batches,
        measurement.seconds,
        tolerance=tolerance,
        least=least_s,
        goes_on=lambda: goes_on(1.0),
    )


def _ranges(timer: LayerTimer, degree: int, profile: LayerProfile) -> list[Range]:
    has_encoder = profile.has_encoder
    return ranges_of(timer.sizes, degree, timer.num_devices, has_encoder=has_encoder)


@final
class _Measurement:
    def __init__(self, timer: LayerTimer, profile: LayerProfile, bar: tqdm):
        self._timer = timer
        self._profile = profile
        self._bar = bar
        self._was_known = True

    @property
    def is_known(self) -> bool:
        """Whether the newest point came from the profile, so that it took no time."""
        return self._was_known

    def expect(self, ranges: Sequence[Range]) -> None:
        """Count the points that these curves need at least, for the bar's estimate."""
        fewest = sum(3 if each.high > each.low else 1 for each in ranges)
        self._bar.total = (self._bar.total or 0) + fewest
        self._bar.refresh()

    def seconds(self, name: str, at: int) -> float:
        known = self._profile.seconds.get(name, {}).get(at)
        self._was_known = known is not None
        if known is None:
            self._bar.set_postfix_str(f"{name} {at}", refresh=False)
            known = self._measured(name, at)
            self._profile.add(name, at, known)
        self._bar.total = max(self._bar.total or 0, self._bar.n + 1)
        self._bar.update()
        return known

    def _measured(self, name: str, at: int) -> float:
        part, _, degree = name.partition("@")
        kind, _, batch = part.partition(" ")
        if kind not in batch_parts(has_encoder=self._profile.has_encoder):
            return self._timer.seconds(part, int(degree), at)
        longest = self._timer.sizes.max_length
        if not batch:
            return self._timer.batch_s(kind, int(degree), at, longest)
        whole = self._profile.seconds[curve(kind, int(degree))]
        if at == longest:  # measured as a point of the curve over batches
            return whole[int(batch)]
        return self._timer.batch_s(kind, int(degree), int(batch), at)
