"""The search for RRA schedules of one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.planning.schedules.candidate import Candidate, Score
from jaxserve.planning.schedules.configuration import Layout, Points, Schedule
from jaxserve.planning.schedules.estimates import Estimates
from jaxserve.planning.schedules.lengths import TaskLengths
from jaxserve.planning.schedules.measured_cost import measured_deployment
from jaxserve.planning.schedules.observed import RequestClass, spans_of
from jaxserve.planning.schedules.plan import CLOSED_FORM
from jaxserve.planning.schedules.planner import SchedulePlanner
from jaxserve.planning.schedules.remembered import RememberedTimeline
from jaxserve.planning.schedules.rra import RRATimeline
from jaxserve.planning.schedules.search import maximise
from jaxserve.planning.schedules.timeline import Deployment
from jaxserve.planning.step_times import StepTimes

# What sums of shares may be off by.
_ROUNDED = 1 + 1e-9


@final
@dataclass(frozen=True, kw_only=True)
class RRAPlanner(SchedulePlanner):
    """A planner of one engine's RRA schedules, for any lengths.

    It searches all schedules for one that keeps the bounds of all classes (`search.maximise`).

    Attributes:
      deploy: returns the engine's costs for requests of these lengths.
      layouts: the layouts that the engine can run.
      num_awaited: iterations that a request with a bound of its own waits for at most before its
        prompt is computed: those of the steps in flight.
      num_slots: see `max_slots`.
    """

    deploy: Callable[[TaskLengths], Deployment]
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

        def deploy(lengths: TaskLengths) -> Deployment:
            means = lengths.inputs.mean, lengths.outputs.less_one().mean
            return measured_deployment(times, config(), *means)

        sizes = times.origin.config
        return cls(
            deploy=deploy,
            num_awaited=2 * sizes.max_decode_iterations,
            num_slots=sizes.max_slots,
        )

    @property
    def max_slots(self) -> int:
        return self.num_slots

    def space(self, lengths: TaskLengths, classes: Sequence[RequestClass]) -> RRASpace:
        # Steps in flight come before its prompt, and its own step beside the running answers.
        own = tuple(
            (span.num_tokens + 1 + span.is_whole * self.num_awaited, span.bound_s)
            for span in spans_of(classes)
        )
        limited = self.deploy(lengths)
        # A batch that runs until all have ended has no more sequences than it began with.
        most = max(limited.max_sequences, self.num_slots * _ROUNDED)
        filled = replace(limited, max_sequences=most)
        timeline = RRATimeline(limited, lengths, self.layouts, own)
        whole = RRATimeline(filled, lengths, self.layouts, own, timeline.phases)
        return RRASpace(timeline, whole, lengths.inputs.max_length)


@final
@dataclass(frozen=True)
class RRASpace:
    """The RRA schedules of one engine for requests of given lengths.

    Attributes:
      timeline: of all schedules.
      whole_timeline: of those whose decode phases last until all answers have ended. They may fill
        the slots; others leave some free, because their batches differ from the average.
    """

    timeline: RRATimeline
    whole_timeline: RRATimeline
    longest_prompt: int
    _known: RememberedTimeline = field(init=False, repr=False, compare=False)
    _known_whole: RememberedTimeline = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_known", RememberedTimeline(self.timeline))
        object.__setattr__(self, "_known_whole", RememberedTimeline(self.whole_timeline))

    def estimate(self, schedule: Schedule) -> str:
        return CLOSED_FORM

    def best(self, score: Score) -> Schedule | None:
        found = maximise([self._known], score).found
        return None if found is None else self._schedule(self.timeline, found.point)

    def whole(self, score: Score) -> Schedule | None:
        """Return the best schedule whose decode phases last until all answers have ended."""
        timeline = self.whole_timeline
        shape = len(timeline.layouts), timeline.max_encode_batch
        layout, batch = np.unravel_index(np.arange(np.prod(shape)), shape)
        points = Points(layout, batch + 1, np.full(len(layout), timeline.max_control))
        found = Candidate().improved(self._known_whole, points, score).found
        return None if found is None else self._schedule(timeline, found.point)

    def nearest(self, schedule: Schedule) -> Schedule:
        return self._schedule(self.timeline, self._point(schedule))

    def estimated(self, schedule: Schedule) -> Estimates:
        is_whole = schedule.num_decodes >= self.timeline.max_control
        known = self._known_whole if is_whole else self._known
        return known.estimate(self._point(schedule))[0]

    def own_latencies_s(self, schedule: Schedule) -> list[float]:
        point = self._point(schedule)
        return [float(each[0]) for each in self.timeline.own_latencies_s(point)]

    def static(self, schedule: Schedule) -> Schedule:
        """Return a schedule with batches of B_E sequences if its phases last until all answers end.

        They have as many, or up to a tenth more, however long their prompts are: no running answer
        waits for these, so they need not be even. Other schedules are returned as they are.
        """
        if schedule.num_decodes < self.timeline.max_control or not schedule.decode_batch:
            return schedule
        batch = float(schedule.encode_batch)
        tokens = batch * max(1, self.longest_prompt)
        return replace(schedule, encode_tokens=tokens, decode_batch=batch)

    def _schedule(self, timeline: RRATimeline, point: Points) -> Schedule:
        """Return a schedule without stages: step times are of an engine as it is."""
        return replace(timeline.schedule(point), stages=())

    def _point(self, schedule: Schedule) -> Points:
        # No phase lasts longer than the longest answer.
        num_decodes = min(schedule.num_decodes, self.timeline.max_control)
        layout = self.timeline.layouts.index(schedule.layout)
        return Points.one(layout, schedule.encode_batch, num_decodes)
