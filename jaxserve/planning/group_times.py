"""Measured step times of two device groups, and of the handovers between them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from jaxserve.core.clock import Clock
from jaxserve.execution.pages import PAGES_A_CALL
from jaxserve.execution.protocol import Executor
from jaxserve.execution.step_cost import StepCost, StepWork
from jaxserve.planning.profiler import measure, measure_beside
from jaxserve.planning.step_times import (
    Curve,
    Origin,
    StepTimes,
    checked_number,
    raise_if_foreign,
    read_table,
    write_table,
)
from jaxserve.scheduling.plan import LINK, Handover, StepPlan


@final
@dataclass(frozen=True)
class GroupCosts:
    """The costs of each group's steps and of the KV handovers between groups.

    The link carries one handover at a time, while the groups compute.

    Attributes:
      groups: the costs of each device group, by its number in `StepPlan.group`.
      page_bytes: bytes of a page, in all layers.
      link_bytes_per_s: bandwidth of all links between two groups together. Through host memory, as
        in ExeGPT's runner (section 3), a page crosses two links in turn, at half the bandwidth.
      handover_s: fixed seconds of a handover, without its bytes.
      beside: how many times as long a step of each group takes while the other group computes; see
        `GroupTimes`.
      copies_follow_steps: whether a handover begins only after its source has run the steps that
        were submitted before it, as on devices.
    """

    groups: tuple[StepCost, ...]
    page_bytes: float
    link_bytes_per_s: float
    handover_s: float = 0.0
    beside: tuple[float, ...] = (1.0, 1.0)
    copies_follow_steps: bool = False

    def host_s(self, plan: StepPlan) -> float:
        return self.groups[0 if plan.handovers else plan.group].host_s(plan)

    def device_s(self, work: StepWork) -> float:
        plan = work.plan
        if not plan.handovers:
            slower = self.beside[plan.group] if work.is_beside else 1.0
            return slower * self.groups[plan.group].device_s(work)
        num_bytes = plan.num_pages_handed_over * self.page_bytes
        before_s = work.source_s if self.copies_follow_steps else 0.0
        return before_s + self.handover_s + num_bytes / self.link_bytes_per_s


# Pages of the larger timed handover; the smaller one has the pages of one call.
_MANY_PAGES = 4 * PAGES_A_CALL
_TIMINGS = 5


@final
@dataclass(frozen=True, kw_only=True)
class GroupTimes:
    """Step times of two device groups, each measured while the other is idle.

    Attributes:
      groups: step times of the encode group and of the decode group.
      handover_s: seconds of a handover without its pages, from submission to arrival.
      page_s: seconds of each page of a handover.
      beside: how many times as long a step of each group takes while the other group computes,
        pages are handed over, and the host plans; above 1 where the groups share something, as host
        devices share cores.
    """

    groups: tuple[StepTimes, ...]
    handover_s: float
    page_s: float
    beside: tuple[float, ...] = (1.0, 1.0)

    def save(self, path: str | Path) -> None:
        """Write a JSON file, which `load` reads."""
        groups = [times.to_json() for times in self.groups]
        rest = {name: getattr(self, name) for name in ("handover_s", "page_s", "beside")}
        write_table(path, {"groups": groups, **rest})

    @classmethod
    def load(cls, path: str | Path, *, expected: Sequence[Origin] | None = None) -> GroupTimes:
        """Read a file that `save` wrote.

        Args:
          expected: the origin of each group.

        Raises:
          InvalidProfileError: the file has no times of two groups, or an origin is not as expected.
        """
        times = read_table(path, cls._from_json, "times of two groups", "GroupTimes.save")
        for group, origin in enumerate(expected or ()):
            name = ("encode", "decode")[group]
            raise_if_foreign(times.groups[group].origin, origin, f"the {name} group of {path}")
        return times

    @classmethod
    def _from_json(cls, read: dict[str, Any]) -> GroupTimes:
        encode, decode = map(StepTimes.from_json, read["groups"])
        of_encode, of_decode = map(checked_number, read["beside"])
        if min(of_encode, of_decode) < 1:
            raise ValueError(f"beside={read['beside']}: a step beside another takes no less time")
        return cls(
            groups=(encode, decode),
            handover_s=checked_number(read["handover_s"]),
            page_s=checked_number(read["page_s"]),
            beside=(of_encode, of_decode),
        )

    def costs(self) -> GroupCosts:
        # The unit of bytes is a page, because the seconds of a page are measured.
        return GroupCosts(
            self.groups,
            page_bytes=1.0,
            link_bytes_per_s=1.0 / max(self.page_s, 1e-12),
            handover_s=self.handover_s,
            beside=self.beside,
            copies_follow_steps=True,
        )


def measure_groups(
    executor: Executor,
    origins: Sequence[Origin],
    clock: Clock,
    *,
    rounds: int = 2,
    progress: bool = True,
) -> GroupTimes:
    """Time the steps of each device group, alone and while the other computes, and the handovers.

    The executor must be idle. Afterwards its slots are inert and its pages are overwritten.

    Args:
      origins: the origin of each group's table.
      clock, rounds: see `measure`.
    """
    groups = tuple(
        measure(executor, origin, clock, group=group, rounds=rounds, progress=progress)
        for group, origin in enumerate(origins)
    )
    few = min(PAGES_A_CALL, executor.config.num_pages - 1)
    many = min(_MANY_PAGES, executor.config.num_pages - 1)
    few_s, many_s = (_handover_s(executor, clock, num_pages) for num_pages in (few, many))
    page_s = max(0.0, many_s - few_s) / (many - few) if many > few else few_s / few
    return GroupTimes(
        groups=groups,
        handover_s=max(0.0, few_s - few * page_s),
        page_s=page_s,
        beside=measure_beside(executor, clock),
    )


def _handover_s(executor: Executor, clock: Clock, num_pages: int) -> float:
    handover = Handover(0, 0, 1, tuple(range(1, 1 + num_pages)))
    plan = StepPlan(index=0, num_iterations=0, handovers=(handover,), group=LINK)
    seconds = []
    for _ in range(_TIMINGS + 1):
        begin_s = clock.now()
        executor.submit(plan).collect()
        seconds.append(clock.now() - begin_s)
    return statistics.median(seconds[1:])


# Times that depend on the number of devices in a group.
_DIVIDED = ("decode_s", "prefill_s", "encode_s")


@final
class GroupSizes:
    """Step times by group size, measured or derived; times of one group also serve the other."""

    def __init__(self, measured: GroupTimes):
        self._measured: dict[int, StepTimes] = {}
        self._present = measured
        self.learn(measured)

    def learn(self, measured: GroupTimes) -> None:
        self._present = measured
        for times in measured.groups:
            self.add(times)

    def add(self, times: StepTimes) -> None:
        """Add the times of a group of `times.origin.device["count"]` devices."""
        self._measured[times.origin.device["count"]] = times

    def is_measured(self, *sizes: int) -> bool:
        return all(size in self._measured for size in sizes)

    def times(self, encode: int, decode: int) -> GroupTimes:
        """Return the times of groups of these sizes; handovers keep their measured times."""
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
    """Return the times of a group of `size` devices, derived from `times` (the nearest size).

    A step on k devices takes s + p / k seconds (Amdahl's law). The median ratio to `other`, another
    measured size, gives s and p. Without one s is 0, which overrates larger groups and underrates
    smaller ones. The host's times do not change.
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
    for name in _DIVIDED:
        mine, others = getattr(times, name), getattr(other, name)
        for key, curve in mine.items():
            positions = curve.points[-1][0]
            if key in others and curve(positions) > 0:
                yield others[key](positions) / curve(positions)
