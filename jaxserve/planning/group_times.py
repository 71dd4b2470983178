"""Measured step times of two device groups, and of the handovers between them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from jaxserve.core.clock import Clock
from jaxserve.execution.pages import PAGES_A_CALL
from jaxserve.execution.protocol import Executor
from jaxserve.planning.group_costs import GroupCosts
from jaxserve.planning.origin import Origin
from jaxserve.planning.profiler import measure, measure_beside
from jaxserve.planning.step_times import (
    StepTimes,
    checked_number,
    raise_if_foreign,
    read_table,
    write_table,
)
from jaxserve.scheduling.plan import LINK, Handover, StepPlan

# The pages of the larger handover that is timed; the smaller one has those of a call.
_MANY_PAGES = 4 * PAGES_A_CALL
_TIMINGS = 5


@final
@dataclass(frozen=True, kw_only=True)
class GroupTimes:
    """What the steps of two device groups take, each measured while the other is idle.

    Attributes:
      groups: step times of the encode group and of the decode group.
      handover_s: a handover without its pages, from its submission to its arrival.
      page_s: each of its pages.
      beside: how many times as long a step of each group takes while the other one computes, pages
        are handed over, and the host plans. It is more than 1 where they share something, as host
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
        """Read what `save` wrote.

        Args:
          expected: the origin of each group.

        Raises:
          InvalidProfileError: the file has no times of two groups, or an origin is not the expected
            one.
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
        """Return the costs of a simulated executor's steps."""
        # Bytes are counted in pages, whose seconds are measured.
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
    """Time the steps of each device group, alone and beside the other's, and handovers.

    The executor must be idle; its slots are inert afterwards, and its pages have other contents.

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
    """Return the median seconds of a handover of so many pages, between idle groups."""
    handover = Handover(0, 0, 1, tuple(range(1, 1 + num_pages)))
    plan = StepPlan(index=0, num_iterations=0, handovers=(handover,), group=LINK)
    seconds = []
    for _ in range(_TIMINGS + 1):
        begin_s = clock.now()
        executor.submit(plan).collect()
        seconds.append(clock.now() - begin_s)
    return statistics.median(seconds[1:])
