"""The search for RRA schedules of one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import final

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.planning.schedules.layer_cost import Boxes, Deployment, Timeline
from jaxserve.planning.schedules.lengths import TaskLengths
from jaxserve.planning.schedules.measured_cost import measured_deployment
from jaxserve.planning.schedules.observed import RequestClass, spans_of
from jaxserve.planning.schedules.plan import CLOSED_FORM
from jaxserve.planning.schedules.planner import SchedulePlanner
from jaxserve.planning.schedules.rra import RRATimeline
from jaxserve.planning.schedules.schedule import Best, Estimates, ParallelLayout, Points, Schedule
from jaxserve.planning.schedules.search import Incumbent, Score, maximise
from jaxserve.planning.step_times import StepTimes


@final
class RememberedTimeline:
    """A `Timeline` that caches the figures of another one, for searches with other scores."""

    def __init__(self, timeline: Timeline):
        self._timeline = timeline
        self._points: dict[tuple[int, ...], np.ndarray] = {}
        self._boxes: dict[tuple[int, ...], np.ndarray] = {}

    @property
    def layouts(self) -> tuple[ParallelLayout, ...]:
        return self._timeline.layouts

    @property
    def max_encode_batch(self) -> int:
        return self._timeline.max_encode_batch

    @property
    def max_control(self) -> int:
        return self._timeline.max_control

    def estimate(self, points: Points) -> Estimates:
        def computed(which: np.ndarray) -> np.ndarray:
            return _table(self._timeline.estimate(points[which]))

        return Estimates(**_columns(Estimates, _known(self._points, _keys(points), computed)))

    def boxes(self) -> Boxes:
        return self._timeline.boxes()

    def bound(self, boxes: Boxes) -> Best:
        def computed(which: np.ndarray) -> np.ndarray:
            return _table(self._timeline.bound(boxes[which]))

        keys = [
            (*low, *high) for low, high in zip(_keys(boxes.low), _keys(boxes.high), strict=True)
        ]
        return Best(**_columns(Best, _known(self._boxes, keys, computed)))

    def schedule(self, point: Points) -> Schedule:
        return self._timeline.schedule(point)


def _keys(points: Points) -> list[tuple[int, ...]]:
    parts = points.layout.tolist(), points.encode_batch.tolist(), points.control.tolist()
    return list(zip(*parts, strict=True))


def _known(
    rows: dict[tuple[int, ...], np.ndarray],
    keys: Sequence[tuple[int, ...]],
    computed: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Return the row of each key [keys, figures]; compute and cache missing rows."""
    missing = [index for index, key in enumerate(keys) if key not in rows]
    if missing:
        for index, row in zip(missing, computed(np.array(missing)), strict=True):
            rows[keys[index]] = row
    return np.array([rows[key] for key in keys])


def _table(figures: Estimates | Best) -> np.ndarray:
    return np.stack([np.asarray(getattr(figures, f.name), float) for f in fields(figures)], axis=1)


def _columns(kind: type[Estimates] | type[Best], rows: np.ndarray) -> dict[str, np.ndarray]:
    columns = {f.name: rows[:, i] for i, f in enumerate(fields(kind))}
    return columns | {"fits": columns["fits"] > 0}


# Rounding error of sums of shares.
_ROUNDED = 1 + 1e-9


@final
@dataclass(frozen=True, kw_only=True)
class RRAPlanner(SchedulePlanner):
    """A planner of one engine's RRA schedules, for any lengths.

    It searches all schedules for the best that keeps the bounds of all classes (`search.maximise`).

    Attributes:
      deploy: returns the engine's costs for requests of these lengths.
      num_awaited: most iterations (those of the steps in flight) before the prompt of a request
        with a bound of its own is computed.
    """

    deploy: Callable[[TaskLengths], Deployment]
    layouts: tuple[ParallelLayout, ...] | None = None
    num_awaited: int = 2
    num_slots: int = 0

    @classmethod
    def measured(cls, times: StepTimes, config: Callable[[], EngineConfig]) -> RRAPlanner:
        """Return the planner of an engine's present slots and pages, with measured step times."""

        def deploy(lengths: TaskLengths) -> Deployment:
            means = lengths.inputs.mean, lengths.outputs.less_one().mean
            return measured_deployment(times, config(), *means)

        sizes = times.origin.config
        return cls(
            deploy=deploy, num_awaited=2 * sizes.max_decode_iterations, num_slots=sizes.max_slots
        )

    @property
    def max_slots(self) -> int:
        return self.num_slots

    def space(self, lengths: TaskLengths, classes: Sequence[RequestClass]) -> RRASpace:
        # Before its first token are the steps in flight, and its own step with the running answers.
        own = tuple(
            (span.num_tokens + 1 + span.is_whole * self.num_awaited, span.bound_s)
            for span in spans_of(classes)
        )
        limited = self.deploy(lengths)
        # A batch that runs until all answers have ended never grows.
        most = max(limited.max_sequences, self.num_slots * _ROUNDED)
        filled = replace(limited, max_sequences=most)
        timeline = RRATimeline(limited, lengths, self.layouts, own)
        whole = RRATimeline(filled, lengths, self.layouts, own, timeline.phases)
        return RRASpace(timeline, whole, lengths.inputs.max_length)


@final
@dataclass(frozen=True)
class RRASpace:
    """The RRA schedules of one engine for requests of given lengths.

    `whole_timeline` has those whose decode phases last until all answers have ended. They may fill
    the slots; the rest leave some free, because their batches vary.
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
        found = Incumbent().improved(self._known_whole, points, score).found
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

        Such batches have B_E to 1.1 B_E sequences with prompts of any length: no running answer
        waits for these, so they need not be even. Other schedules are returned unchanged.
        """
        if schedule.num_decodes < self.timeline.max_control or not schedule.decode_batch:
            return schedule
        batch = float(schedule.encode_batch)
        tokens = batch * max(1, self.longest_prompt)
        return replace(schedule, encode_tokens=tokens, decode_batch=batch)

    def _schedule(self, timeline: RRATimeline, point: Points) -> Schedule:
        """Return a schedule without stages, because step times are of the present stages."""
        return replace(timeline.schedule(point), stages=())

    def _point(self, schedule: Schedule) -> Points:
        # A phase never exceeds the longest answer.
        num_decodes = min(schedule.num_decodes, self.timeline.max_control)
        layout = self.timeline.layouts.index(schedule.layout)
        return Points.one(layout, schedule.encode_batch, num_decodes)
