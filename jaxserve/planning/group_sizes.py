"""Step times of device groups of several sizes, from those that were measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, final

from jaxserve.planning.group_times import GroupTimes
from jaxserve.planning.step_times import Curve, StepTimes

# Times that a group of another size divides among its devices.
_DIVIDED = ("decode_s", "prefill_s", "encode_s")


@final
class GroupSizes:
    """Step times by the number of devices of a group, measured or derived from measured ones.

    A group measures every kind of step, so that either group may have what the other one measured.

    Args:
      measured: times of the present groups.
    """

    def __init__(self, measured: GroupTimes):
        self._measured: dict[int, StepTimes] = {}
        self._present = measured
        self.learn(measured)

    def learn(self, measured: GroupTimes) -> None:
        """Take in times of both groups, and of the handovers between them."""
        self._present = measured
        for times in measured.groups:
            self.add(times)

    def add(self, times: StepTimes) -> None:
        """Take in times of a group of `times.origin.device["count"]` devices."""
        self._measured[times.origin.device["count"]] = times

    def is_measured(self, *sizes: int) -> bool:
        """Return whether no times of groups of these sizes are derived."""
        return all(size in self._measured for size in sizes)

    def times(self, encode: int, decode: int) -> GroupTimes:
        """Return the times of groups of these sizes; handovers take what they took when measured.

        Args:
          encode, decode: numbers of devices.
        """
        groups = tuple(map(self._of_size, (encode, decode)))
        return replace(self._present, groups=groups)

    def _of_size(self, size: int) -> StepTimes:
        if size in self._measured:
            return self._measured[size]
        near = sorted(self._measured, key=lambda each: abs(math.log(each / size)))
        nearest = self._measured[near[0]]
        other = self._measured[near[1]] if near[1:] else None
        return derived(nearest, size, other)


def derived(times: StepTimes, size: int, other: StepTimes | None = None) -> StepTimes:
    """Return the times of a group of `size` devices, from those of groups of other sizes.

    A step on k devices takes s + p / k seconds (Amdahl's law). Measured times of two sizes give s
    and p, from the median ratio of their entries; with one size s is 0, so that more devices are
    taken as better than they are, and fewer as worse. What the host does is as it was.

    Args:
      times: of the size that is nearest.
      other: of another size; None if there is one size.
    """
    count = times.origin.device["count"]
    parallel = 1.0
    if other is not None:
        share = count / other.origin.device["count"]
        ratio = statistics.median(_ratios(times, other))
        # Of a step on `count` devices; ratio = (1 - parallel) + parallel * share.
        parallel = min(1.0, max(0.0, (ratio - 1) / (share - 1)))
    factor = (1 - parallel) + parallel * count / size
    divided: dict[str, Any] = {
        name: {
            key: Curve(tuple((position, factor * s) for position, s in curve.points))
            for key, curve in getattr(times, name).items()
        }
        for name in _DIVIDED
    }
    origin = replace(times.origin, device={**times.origin.device, "count": size})
    return replace(times, origin=origin, **divided)


def _ratios(times: StepTimes, other: StepTimes) -> Iterator[float]:
    """Yield how many times as long each entry of `other` takes."""
    for name in _DIVIDED:
        mine, others = getattr(times, name), getattr(other, name)
        for key, curve in mine.items():
            positions = curve.points[-1][0]
            if key in others and curve(positions) > 0:
                yield others[key](positions) / curve(positions)
