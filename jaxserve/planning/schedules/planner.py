"""The parts that all planners of one engine share: planning, the nearest schedule, expectations."""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from jaxserve.core.errors import DeviceMemoryError, InfeasibleBoundError
from jaxserve.planning.schedules.lengths import TaskLengths
from jaxserve.planning.schedules.observed import RequestClass
from jaxserve.planning.schedules.plan import SchedulePlan
from jaxserve.planning.schedules.schedule import Best, Estimates, LatencyBounds, Schedule
from jaxserve.planning.schedules.search import (
    Score,
    nearest_to,
    shortest,
    shortest_with,
    throughput_under,
)

_log = logging.getLogger(__name__)

# Factor within which throughputs count as equal, so that the shorter latency wins.
_BETTER = 1 + 1e-9


class ScheduleSpace(Protocol):
    """All schedules of one engine for requests of given lengths."""

    def estimate(self, schedule: Schedule) -> str:
        """Return the source of a schedule's figures, see `SchedulePlan`."""
        ...

    def best(self, score: Score) -> Schedule | None:
        """Return the schedule with the highest score; None if none is above 0."""
        ...

    def nearest(self, schedule: Schedule) -> Schedule:
        """Return this space's schedule that is closest in B_E and N_D."""
        ...

    def estimated(self, schedule: Schedule) -> Estimates:
        """Return the expected figures of a schedule of this space, each a scalar."""
        ...

    def own_latencies_s(self, schedule: Schedule) -> Sequence[float]:
        """Return the seconds of the spans of all classes (`observed.spans_of`)."""
        ...


class SchedulePlanner(abc.ABC):
    """A planner of one engine's schedules, for any lengths."""

    @property
    @abc.abstractmethod
    def max_slots(self) -> int:
        """Slots of the engine, of which requests with bounds of their own may reserve half."""

    def staying(self) -> SchedulePlanner:
        """Return a planner of the same schedules that moves no devices."""
        return self

    @abc.abstractmethod
    def space(self, lengths: TaskLengths, classes: Sequence[RequestClass]) -> ScheduleSpace:
        """Return the schedules for these lengths; `classes` count in `Estimates.own_share`."""

    def plan(
        self,
        lengths: TaskLengths,
        bounds: LatencyBounds,
        *,
        num_lengths: int,
        classes: Sequence[RequestClass] = (),
    ) -> SchedulePlan:
        """Return the plan with the highest throughput whose long answers keep all bounds.

        Of equal ones it is that with the lowest latency.

        Args:
          lengths: those of all requests, classes included.
          num_lengths: number of answers behind the lengths, for the record.
          classes: requests with bounds of their own.

        Raises:
          InfeasibleBoundError: no schedule keeps the bounds; it gives the lowest feasible value of
            each.
          DeviceMemoryError: one answer of these lengths is expected to exceed the memory.
        """
        began_s = time.perf_counter()
        space = self.space(lengths, classes)
        best = self._chosen(space, bounds)
        if best is None:
            raise self._infeasible(space, lengths, bounds, classes)
        plan = _plan(space, best, lengths, bounds, num_lengths, began_s, classes)
        return self._finished(plan, space)

    def nearest(
        self,
        lengths: TaskLengths,
        bounds: LatencyBounds,
        *,
        num_lengths: int,
        classes: Sequence[RequestClass] = (),
    ) -> SchedulePlan:
        """Return `plan`, or the schedule that misses the bounds least if none keeps them.

        Raises:
          DeviceMemoryError: see `plan`.
        """
        began_s = time.perf_counter()
        try:
            return self.plan(lengths, bounds, num_lengths=num_lengths, classes=classes)
        except InfeasibleBoundError as error:
            space = self.space(lengths, classes)
            nearest = self._nearest(space, bounds)
            assert nearest is not None, "some schedule fits, or `plan` says that none does"
            plan = _plan(space, nearest, lengths, bounds, num_lengths, began_s, classes)
            return replace(self._finished(plan, space), lowest=dict(error.lowest))

    def expected(
        self,
        plan: SchedulePlan,
        lengths: TaskLengths,
        *,
        num_lengths: int,
        classes: Sequence[RequestClass] = (),
    ) -> SchedulePlan:
        """Return the expected figures of a plan's schedule for other lengths and classes."""
        began_s = time.perf_counter()
        space = self.space(lengths, classes)
        schedule = space.nearest(plan.schedule)
        found = _plan(space, schedule, lengths, plan.bounds, num_lengths, began_s, classes)
        return self._as_it_stands(found, space)

    def possible(
        self, lengths: TaskLengths, bounds: LatencyBounds, classes: Sequence[RequestClass]
    ) -> tuple[RequestClass, ...]:
        """Return the classes to serve; fewer if no schedule keeps all bounds.

        Classes whose bounds no schedule keeps are dropped; or if all are feasible but together
        reserve too many slots for `bounds`, the class that misses its own most. A warning names
        them. An idle engine may have served them, and any request may ask for any bound, so they
        must not determine how all other requests are served.
        """
        found, shares = [], []
        for each in classes:
            alone = self.space(lengths, [each])
            best = alone.best(nearest_to(LatencyBounds()))
            share = 0.0 if best is None else float(alone.estimated(best).own_share)
            if best is None or share <= 1:
                found.append(each)
                shares.append(share)
                continue
            lowest = _by_name(each, alone.own_latencies_s(best))
            _log.warning(
                "requests with bounds that no schedule keeps are not planned for: %s",
                ", ".join(f"{name} (lowest is {s:.4g})" for name, s in lowest.items()),
            )
        if not found or len(found) < len(classes):
            return tuple(found)
        if self._chosen(self.space(lengths, ()), bounds) is None:
            return tuple(found)
        loosest = found.pop(int(np.argmin(shares)))
        _log.warning(
            "no slots are reserved for requests with %s, since the bounds of all others could not "
            "be kept beside them",
            ", ".join(_by_name(loosest, [span.bound_s for span in loosest.spans])),
        )
        return tuple(found)

    def _chosen(self, space: Any, bounds: LatencyBounds) -> Schedule | None:
        return chosen(space, bounds)

    def _nearest(self, space: Any, bounds: LatencyBounds) -> Schedule | None:
        return space.best(nearest_to(bounds))

    def _finished(self, plan: SchedulePlan, space: Any) -> SchedulePlan:
        """Return a plan with further facts about its space."""
        return plan

    def _as_it_stands(self, plan: SchedulePlan, space: Any) -> SchedulePlan:
        """Return the expected figures of a plan in force, with further facts about its space."""
        return plan

    def _infeasible(
        self,
        space: ScheduleSpace,
        lengths: TaskLengths,
        bounds: LatencyBounds,
        classes: Sequence[RequestClass],
    ) -> InfeasibleBoundError | DeviceMemoryError:
        lowest, asked = {}, bounds.finite()
        space = self.space(lengths, ()) if classes else space
        for name in bounds.finite():
            found = space.best(shortest(name))
            if found is None:
                return _too_long(lengths)
            lowest[name] = float(getattr(space.estimated(found), name))
        for each in classes:
            alone = self.space(lengths, [each])
            found = alone.best(nearest_to(LatencyBounds()))
            if found is None:
                return _too_long(lengths)
            asked |= _by_name(each, [span.bound_s for span in each.spans])
            lowest |= _by_name(each, alone.own_latencies_s(found))
        return InfeasibleBoundError(asked, lowest) if lowest else _too_long(lengths)


def chosen(space: ScheduleSpace, bounds: LatencyBounds) -> Schedule | None:
    """Return the schedule with the highest throughput under bounds; None if none keeps them.

    Of equal ones it is that with the lowest latency.
    """
    most = space.best(throughput_under(bounds))
    if most is None:
        return None
    least = float(space.estimated(most).throughput) / _BETTER
    return space.best(shortest_with(bounds, least)) or most


def lowest_latency_s(space: ScheduleSpace, fixed: LatencyBounds) -> float:
    """Return the lowest latency of the schedules that keep `fixed`; at least one must."""
    score = shortest("latency_s")

    def lowest(figures: Estimates | Best) -> np.ndarray:
        return np.where(fixed.met(figures), score(figures), 0.0)

    best = space.best(lowest)
    assert best is not None, "some schedule keeps the bounds, or a search says that none does"
    return float(space.estimated(best).latency_s)


def _plan(
    space: ScheduleSpace,
    schedule: Schedule,
    lengths: TaskLengths,
    bounds: LatencyBounds,
    num_lengths: int,
    began_s: float,
    classes: Sequence[RequestClass],
) -> SchedulePlan:
    estimates = space.estimated(schedule)
    rate = float(estimates.throughput)
    own = iter(space.own_latencies_s(schedule))
    return SchedulePlan(
        schedule=schedule,
        bounds=bounds,
        latency_s=float(estimates.latency_s),
        first_token_s=float(estimates.first_token_s),
        token_s=float(estimates.token_s),
        answers_per_s=rate,
        tokens_per_s=rate * lengths.outputs.mean,
        max_answer_tokens=lengths.outputs.percentile(lengths.level),
        num_lengths=num_lengths,
        search_s=time.perf_counter() - began_s,
        classes=tuple(
            (each, {span.name: float(next(own)) / span.per for span in each.spans})
            for each in classes
        ),
        fits=bool(estimates.fits),
        estimate=space.estimate(schedule),
    )


def _by_name(own: RequestClass, seconds: Iterable[float]) -> dict[str, float]:
    """Return the seconds of each span of a class in its bound's unit, by the bound's name."""
    return {
        f"{span.name}={span.bound_s / span.per:.4g}": float(s) / span.per
        for span, s in zip(own.spans, seconds, strict=True)
    }


def _too_long(lengths: TaskLengths) -> DeviceMemoryError:
    return DeviceMemoryError(
        f"an answer with a prompt of {lengths.inputs.mean:.0f} tokens on average and up to "
        f"{lengths.outputs.max_length} output tokens is expected to need more pages than the page "
        "pool has; pass more kv_memory (Runtime.resize_kv), or requests with a lower max_tokens"
    )
