"""The search for RRA schedules of one engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import final

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import DeviceMemoryError, InfeasibleBoundError, InvalidConfigError
from jaxserve.planning.schedules.configuration import Layout, Points, Schedule
from jaxserve.planning.schedules.estimates import LatencyBounds
from jaxserve.planning.schedules.lengths import LengthDistribution, TaskLengths
from jaxserve.planning.schedules.measured_cost import measured_deployment
from jaxserve.planning.schedules.observed import RequestClass
from jaxserve.planning.schedules.plan import Plan
from jaxserve.planning.schedules.rra import RRATimeline
from jaxserve.planning.schedules.search import nearest_among, search_among
from jaxserve.planning.schedules.timeline import Deployment
from jaxserve.planning.step_times import StepTimes


@final
@dataclass(frozen=True, kw_only=True)
class RRAPlanner:
    """A planner of one engine's RRA schedules, for any lengths.

    Attributes:
      deploy: returns the engine's costs for (lengths, N_D); N_D is None for a search over all.
      layouts: the layouts that the engine can run.
      num_awaited: iterations that a request with a bound of its own waits for at most before its
        prompt is computed: those of the steps in flight.
      num_slots: slots of the engine, of which such requests may reserve half.
    """

    deploy: Callable[[TaskLengths, int | None], Deployment]
    layouts: tuple[Layout, ...] | None = None
    num_awaited: int = 2
    num_slots: int = 0

    @classmethod
    def measured(cls, times: StepTimes, config: Callable[[], EngineConfig]) -> RRAPlanner:
        """Return the planner of an engine with measured step times.

        Args:
          config: returns the engine's present configuration, whose slots and page pool limit the
            schedule.
        """

        def deploy(lengths: TaskLengths, num_decodes: int | None) -> Deployment:
            means = lengths.inputs.mean, lengths.outputs.less_one().mean
            return measured_deployment(times, config(), *means, num_decodes=num_decodes)

        sizes = times.origin.config
        return cls(
            deploy=deploy,
            num_awaited=2 * sizes.max_decode_iterations,
            num_slots=sizes.max_slots,
        )

    def plan(
        self,
        lengths: TaskLengths,
        bounds: LatencyBounds,
        *,
        num_lengths: int,
        classes: Sequence[RequestClass] = (),
    ) -> Plan:
        """Return the plan with the highest throughput whose long answers keep the bounds.

        With classes, the search runs for each of the bounds alone, and the best of the schedules
        that keep all of them is taken. It is the best of all where one bound is the tightest for
        every schedule, which holds as far as latency is proportional to length.

        Args:
          lengths: those of all requests, classes included.
          num_lengths: answers that the lengths are of, for the record.
          classes: requests with bounds of their own.

        Raises:
          InfeasibleBoundError: no schedule keeps the bounds; it says the lowest feasible ones.
          DeviceMemoryError: one answer of these lengths is expected to need more than the memory.
        """
        plans = self._candidates(lengths, bounds, num_lengths, classes)
        kept = [plan for plan in plans if plan.keeps_bounds]
        if not kept:
            nearest = min(plans, key=lambda plan: plan.worst_share)
            raise InfeasibleBoundError(
                bounds.finite() | _by_name((each, each.latency_bound_s) for each in classes),
                _reached(nearest),
            )
        return max(kept, key=lambda plan: plan.answers_per_s)

    def nearest(
        self,
        lengths: TaskLengths,
        bounds: LatencyBounds,
        *,
        num_lengths: int,
        classes: Sequence[RequestClass] = (),
    ) -> Plan:
        """Return `plan`; or if no schedule keeps the bounds, the schedule that misses them least.

        Raises:
          DeviceMemoryError: see `plan`.
        """
        began_s = time.perf_counter()
        try:
            return self.plan(lengths, bounds, num_lengths=num_lengths, classes=classes)
        except InfeasibleBoundError as error:
            plans = []
            for longest, each in self._constraints(bounds, classes):
                choice = nearest_among([self._timeline(lengths, None, longest)], each)
                plans.append(
                    self._of(choice.schedule, lengths, bounds, num_lengths, began_s, classes)
                )
            plan = min(plans, key=lambda plan: plan.worst_share)
            return replace(plan, lowest=error.lowest)

    def expected(
        self,
        plan: Plan,
        lengths: TaskLengths,
        *,
        num_lengths: int,
        classes: Sequence[RequestClass] = (),
    ) -> Plan:
        """Return what a plan's B_E and N_D are expected to do with other lengths and classes."""
        began_s = time.perf_counter()
        return self._of(plan.schedule, lengths, plan.bounds, num_lengths, began_s, classes)

    def _constraints(
        self, bounds: LatencyBounds, classes: Sequence[RequestClass]
    ) -> list[tuple[int | None, LatencyBounds]]:
        """Return (output tokens of the answer that a bound is for, the bounds)."""
        own = [
            (self._tokens_awaited(each), LatencyBounds(latency_s=each.latency_bound_s))
            for each in classes
        ]
        return [(None, bounds), *own]

    def _tokens_awaited(self, each: RequestClass) -> int:
        # Steps in flight come before its prompt, and its own step beside the running answers.
        return each.max_answer_tokens + self.num_awaited + 1

    def _candidates(
        self,
        lengths: TaskLengths,
        bounds: LatencyBounds,
        num_lengths: int,
        classes: Sequence[RequestClass],
    ) -> list[Plan]:
        """Return the best plan for each of the bounds alone, with what all classes expect."""
        plans = []
        for longest, each in self._constraints(bounds, classes):
            began_s = time.perf_counter()
            try:
                choice = search_among([self._timeline(lengths, None, longest)], each)
            except DeviceMemoryError:
                raise _too_long(lengths) from None
            plans.append(self._of(choice.schedule, lengths, bounds, num_lengths, began_s, classes))
        return plans

    def _of(
        self,
        schedule: Schedule,
        lengths: TaskLengths,
        bounds: LatencyBounds,
        num_lengths: int,
        began_s: float,
        classes: Sequence[RequestClass] = (),
    ) -> Plan:
        # The search allows every round one decode loop too many; this N_D has an exact number.
        timeline = self._timeline(lengths, schedule.num_decodes)
        # No phase lasts longer than the longest answer.
        num_decodes = min(schedule.num_decodes, timeline.max_control)
        layout = timeline.layouts.index(schedule.layout)
        point = Points.one(layout, schedule.encode_batch, num_decodes)
        estimates = timeline.estimate(point)[0]
        reached = []
        for each in classes:
            longest = self._tokens_awaited(each)
            own = self._timeline(lengths, schedule.num_decodes, longest).estimate(point)[0]
            reached.append((each, float(own.latency_s)))
        return Plan(
            schedule=timeline.schedule(point),
            bounds=bounds,
            latency_s=float(estimates.latency_s),
            first_token_s=float(estimates.first_token_s),
            token_s=float(estimates.token_s),
            answers_per_s=float(estimates.throughput),
            tokens_per_s=float(estimates.throughput) * lengths.outputs.mean,
            max_answer_tokens=lengths.outputs.percentile(lengths.level),
            num_lengths=num_lengths,
            search_s=time.perf_counter() - began_s,
            classes=tuple(reached),
            fits=bool(estimates.fits),
        )

    def _timeline(
        self, lengths: TaskLengths, num_decodes: int | None, longest: int | None = None
    ) -> RRATimeline:
        deployment = self.deploy(lengths, num_decodes)
        return RRATimeline(deployment, lengths, self.layouts, longest)


def _by_name(seconds: Iterable[tuple[RequestClass, float]]) -> dict[str, float]:
    return {f"latency_bound={each.latency_bound_s:.4g}": s for each, s in seconds}


def _reached(plan: Plan) -> dict[str, float]:
    """Return the latencies of a plan by the names of its bounds."""
    own = {name: getattr(plan, name) for name in plan.bounds.finite()}
    return own | _by_name(plan.classes)


def plan_rra(
    times: StepTimes,
    config: EngineConfig,
    lengths: Sequence[tuple[int, int]],
    latency_bound_s: float,
    *,
    first_token_bound_s: float = math.inf,
    token_bound_s: float = math.inf,
) -> Plan:
    """Return the plan with the highest throughput whose long answers keep the bounds.

    Args:
      times: measured step times of the engine.
      config: the engine's present configuration; its slots and page pool limit the schedule.
      lengths: prompt and output tokens of each answer; the two are taken as independent.
      latency_bound_s: seconds that an answer of the 99th-percentile length may take, from its
        admission to its end; infinity for no bound, as of the other two.
      first_token_bound_s: seconds to its first token.
      token_bound_s: mean seconds per token after the first.

    Raises:
      InfeasibleBoundError: no schedule keeps the bounds; it says the lowest feasible ones.
      DeviceMemoryError: one answer of these lengths is expected to need more than the page pool.
      InvalidConfigError: there are no lengths, or one is not allowed; or a bound is not above 0.
    """
    bounds = LatencyBounds(
        latency_s=latency_bound_s, first_token_s=first_token_bound_s, token_s=token_bound_s
    )
    planner = RRAPlanner.measured(times, lambda: config)
    return planner.plan(lengths_of(lengths), bounds, num_lengths=len(lengths))


def lengths_of(lengths: Sequence[tuple[int, int]]) -> TaskLengths:
    """Return the distributions of prompt and output lengths.

    Raises:
      InvalidConfigError: there are none, or one is below 1.
    """
    if not lengths or min(map(min, lengths)) < 1:
        raise InvalidConfigError(
            f"lengths of {len(lengths)} answers are not allowed; pass (prompt tokens, output "
            "tokens) of at least one answer, each at least 1"
        )
    inputs, outputs = zip(*lengths, strict=True)
    return TaskLengths(
        LengthDistribution.of_samples(inputs), LengthDistribution.of_samples(outputs)
    )


def _too_long(lengths: TaskLengths) -> DeviceMemoryError:
    return DeviceMemoryError(
        f"an answer with a prompt of {lengths.inputs.mean:.0f} tokens on average and up to "
        f"{lengths.outputs.max_length} output tokens is expected to need more pages than the page "
        "pool has; pass more kv_memory (Runtime.resize_kv), or requests with a lower max_tokens"
    )
