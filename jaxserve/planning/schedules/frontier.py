"""The throughput-latency frontier: the best schedule for each of several latency bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, final

import numpy as np
from tqdm import tqdm

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError
from jaxserve.planning.schedules.continuous import CHUNKS
from jaxserve.planning.schedules.continuous_planner import ContinuousPlanner, ContinuousSpace
from jaxserve.planning.schedules.families import (
    FAMILIES,
    FamiliesPlanner,
    FamiliesSpace,
    planner_of,
)
from jaxserve.planning.schedules.layer_cost import Deployment, Timeline
from jaxserve.planning.schedules.lengths import TaskLengths
from jaxserve.planning.schedules.measured_waa import WAAPlanner, WAASpace
from jaxserve.planning.schedules.plan import CLOSED_FORM, SIMULATED
from jaxserve.planning.schedules.planner import lowest_latency_s
from jaxserve.planning.schedules.played import Player
from jaxserve.planning.schedules.schedule import (
    AllocationPolicy,
    Estimates,
    LatencyBounds,
    Points,
    Schedule,
    check_num_bounds,
)
from jaxserve.planning.schedules.search import (
    CLUSTER_FAMILIES,
    maximise,
    search_among,
    shortest,
    timelines_of,
)
from jaxserve.planning.step_times import GroupTimes, StepTimes
from jaxserve.scheduling.policy import Policy as SchedulingPolicy
from jaxserve.scheduling.presets import get_policy

# Configurations drawn for the background of a picture, per timeline.
_NUM_DRAWN = 1500
# A gap counts as closed below this area: share of the most throughput times log latency ratio.
_CLOSED = 1e-4


@final
@dataclass(frozen=True, kw_only=True)
class ScheduleOutcome:
    """A schedule and its expected figures.

    Attributes:
      estimates: of this schedule, each a scalar.
      tokens_per_s: throughput in output tokens.
      estimate: the source of the figures, see `Plan`.
    """

    schedule: Schedule
    estimates: Estimates
    tokens_per_s: float
    estimate: str

    @property
    def policy(self) -> AllocationPolicy:
        return self.schedule.layout.policy

    @property
    def control(self) -> int:
        """N_D of RRA, B of continuous batching, B_m of WAA on a cluster, B_D on two groups."""
        schedule = self.schedule
        if self._is_on_groups:
            return round(schedule.decode_batch)
        if self.policy is AllocationPolicy.CONTINUOUS:
            return schedule.max_running
        return (
            schedule.num_decodes
            if self.policy is AllocationPolicy.RRA
            else schedule.num_micro_batches
        )

    @property
    def control_name(self) -> str:
        if self.policy is AllocationPolicy.CONTINUOUS:
            return "B"
        if self._is_on_groups:
            return "B_D"
        return "N_D" if self.policy is AllocationPolicy.RRA else "B_m"

    @property
    def control_text(self) -> str:
        """The variable and its value for tables; N_D on two groups, where B_D has a column."""
        on_groups = f"N_D {self.schedule.num_decodes}"
        return on_groups if self._is_on_groups else f"{self.control_name} {self.control}"

    @property
    def _is_on_groups(self) -> bool:
        return (
            self.policy in (AllocationPolicy.WAA_C, AllocationPolicy.WAA_M)
            and not self.schedule.stages
        )

    def figures(self) -> dict[str, Any]:
        schedule, estimates = self.schedule, self.estimates
        return {
            "policy": self.policy.value,
            "encode_batch": schedule.encode_batch,
            "num_decodes": schedule.num_decodes,
            "num_micro_batches": schedule.num_micro_batches,
            "max_running": schedule.max_running,
            "chunk_tokens": schedule.chunk_tokens,
            "decode_batch": schedule.decode_batch,
            "stages": [
                [stage.num_devices, stage.num_encode_layers, stage.num_decode_layers]
                for stage in schedule.stages
            ],
            "answers_per_s": float(estimates.throughput),
            "tokens_per_s": self.tokens_per_s,
            "latency_s": float(estimates.latency_s),
            "first_token_s": float(estimates.first_token_s),
            "token_s": float(estimates.token_s),
            "fits": bool(estimates.fits),
            "estimate": self.estimate,
        }


class ScheduleSearch(Protocol):
    """The schedules of one model on its devices, for requests of given lengths."""

    @property
    def lengths(self) -> TaskLengths: ...

    def best(self, bounds: LatencyBounds) -> ScheduleOutcome:
        """Return the schedule with the highest throughput under the bounds.

        Raises:
          InfeasibleBoundError, DeviceMemoryError: see `search`.
        """
        ...

    def estimated(
        self, schedule: Schedule, encode_batch: int, control: int
    ) -> ScheduleOutcome | None:
        """Return what `schedule` would do with another B_E and another N_D, B_m or B.

        None if there is no such configuration. One that exceeds memory has `fits` False.
        """
        ...

    def lowest_s(self, fixed: LatencyBounds) -> float:
        """Return the lowest latency of a schedule that keeps the bounds `fixed`."""
        ...

    def drawn(self, rng: np.random.Generator) -> np.ndarray:
        """Return (answers per second, latency_s) of other schedules, float [schedules, 2]."""
        ...


@final
@dataclass(frozen=True)
class ClusterSearch:
    """A `ScheduleSearch` of some families on a cluster, by the costs of its layers."""

    deployment: Deployment
    lengths: TaskLengths
    families: tuple[str, ...] = CLUSTER_FAMILIES
    timelines: tuple[Timeline, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        timelines = timelines_of(self.deployment, self.lengths, self.families)
        object.__setattr__(self, "timelines", timelines)

    def best(self, bounds: LatencyBounds) -> ScheduleOutcome:
        choice = search_among(self.timelines, bounds)
        return outcome_of(choice.schedule, choice.estimates, self.lengths)

    def estimated(
        self, schedule: Schedule, encode_batch: int, control: int
    ) -> ScheduleOutcome | None:
        for timeline in self.timelines:
            if schedule.layout in timeline.layouts:
                return _estimated(timeline, schedule, encode_batch, control, self.lengths)
        raise InvalidConfigError(
            f"the layout {schedule.layout} is not one of this cluster; pass a schedule that `best` "
            "returned"
        )

    def lowest_s(self, fixed: LatencyBounds) -> float:
        score = shortest("latency_s")
        best = maximise(self.timelines, lambda of: np.where(fixed.met(of), score(of), 0.0))
        return 1.0 / best.score

    def drawn(self, rng: np.random.Generator) -> np.ndarray:
        return _drawn(self.timelines, rng)


@final
@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The highest throughput for each latency bound.

    Attributes:
      points: (bound in seconds, best schedule), bounds ascending. Several bounds with the same
        schedule are one point, with the smallest of them. The last schedule is also the best beyond
        the last bound.
      drawn: (answers per second, latency_s) of random configurations that fit in memory, float
        [configurations, 2]; a background for pictures.
    """

    points: tuple[tuple[float, ScheduleOutcome], ...]
    drawn: np.ndarray

    @property
    def lowest_s(self) -> float:
        return self.points[0][0]


def frontier_of(
    schedules: ScheduleSearch,
    *,
    num_bounds: int = 16,
    asked: Sequence[float] = (),
    bounds: LatencyBounds | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Frontier:
    """Return the frontier from the lowest feasible bound to no bound at all.

    Between two bounds with known schedules, the throughput is between theirs. Each search halves,
    on a logarithmic scale, the gap with the largest unknown rectangle. So flat parts get few
    bounds.

    Args:
      num_bounds: most bounds to search, in addition to `asked`.
      asked: further latency bounds, each of which must be feasible.
      bounds: other bounds that every schedule must keep; its `latency_s` is not used.
      seed: of the random configurations.
      progress: show a bar on stderr if the searches take over two seconds.

    Raises:
      InfeasibleBoundError: an asked bound, or one of `bounds`, is not feasible.
      DeviceMemoryError: no schedule fits in memory.
      InvalidConfigError: `num_bounds` is below 2.
    """
    check_num_bounds(num_bounds)
    fixed = replace(bounds or LatencyBounds(), latency_s=math.inf)

    def best(bound_s: float) -> tuple[float, ScheduleOutcome]:
        return bound_s, schedules.best(replace(fixed, latency_s=bound_s))

    known = [best(bound_s) for bound_s in sorted({*asked} - {math.inf})]
    _, most = best(math.inf)
    lowest_s = schedules.lowest_s(fixed) * (1 + 1e-9)
    slowest_s = max(float(most.estimates.latency_s), lowest_s)
    known = sorted([*known, best(lowest_s), (slowest_s, most)], key=lambda point: point[0])
    searches = range(num_bounds - 2)
    for _ in tqdm(searches, desc="searching", leave=False, delay=2, disable=not progress):
        area, bound_s = max(map(_open_between, known, known[1:]))
        if area <= _CLOSED * float(most.estimates.throughput):
            break
        known = sorted([*known, best(bound_s)], key=lambda point: point[0])
    return Frontier(
        points=tuple(_distinct(known)), drawn=schedules.drawn(np.random.default_rng(seed))
    )


def neighbours_of(
    schedules: ScheduleSearch, outcome: ScheduleOutcome
) -> dict[str, ScheduleOutcome]:
    """Return the schedules with B_E or `control` one step up or down, named such as "N_D + 1"."""
    control = outcome.control_name
    batch, found = outcome.schedule.encode_batch, {}
    for step, sign in ((-1, "-"), (1, "+")):
        found[f"B_E {sign} 1"] = schedules.estimated(
            outcome.schedule, batch + step, outcome.control
        )
    for step, sign in ((-1, "-"), (1, "+")):
        found[f"{control} {sign} 1"] = schedules.estimated(
            outcome.schedule, batch, outcome.control + step
        )
    return {name: beside for name, beside in found.items() if beside is not None}


def _open_between(
    lower: tuple[float, ScheduleOutcome], upper: tuple[float, ScheduleOutcome]
) -> tuple[float, float]:
    """Return the unknown area between two points, and the bound that halves it."""
    begin_s, end_s = lower[0], float(upper[1].estimates.latency_s)
    if end_s <= begin_s:
        return 0.0, begin_s
    gap = float(upper[1].estimates.throughput - lower[1].estimates.throughput)
    return gap * math.log(end_s / begin_s), math.sqrt(begin_s * end_s)


def _distinct(
    points: Sequence[tuple[float, ScheduleOutcome]],
) -> Iterator[tuple[float, ScheduleOutcome]]:
    before: ScheduleOutcome | None = None
    for bound_s, outcome in points:
        most = 0.0 if before is None else before.estimates.throughput
        if before is None or outcome.estimates.throughput > most:
            yield bound_s, outcome
            before = outcome


def _drawn(timelines: Sequence[Timeline], rng: np.random.Generator) -> np.ndarray:
    """Draw configurations that fit in memory, with B_E and N_D spread over magnitudes."""
    found = []
    for timeline in timelines:
        batch, control = (
            np.exp(rng.uniform(0, np.log(most + 1), _NUM_DRAWN)).astype(int).clip(1, most)
            for most in (timeline.max_encode_batch, timeline.max_control)
        )
        layout = rng.integers(0, len(timeline.layouts), _NUM_DRAWN)
        estimates = timeline.estimate(Points(layout, batch, control))
        fits = estimates.fits
        found.append(np.stack([estimates.throughput[fits], estimates.latency_s[fits]], axis=1))
    return np.concatenate(found)


def _estimated(
    timeline: Timeline, schedule: Schedule, encode_batch: int, control: int, lengths: TaskLengths
) -> ScheduleOutcome | None:
    if schedule.layout.policy is AllocationPolicy.CONTINUOUS:
        if encode_batch != schedule.encode_batch:
            return None
        chunk_tokens = schedule.chunk_tokens // schedule.num_micro_batches
        # An encoder's prompts are whole.
        encode_batch, control = control, 1 + CHUNKS.index(chunk_tokens) if chunk_tokens else 1
    elif control > _most(timeline, schedule):
        return None
    if not (1 <= encode_batch <= timeline.max_encode_batch and control >= 1):
        return None
    point = Points.one(timeline.layouts.index(schedule.layout), encode_batch, control)
    return outcome_of(timeline.schedule(point), timeline.estimate(point)[0], lengths)


def _most(timeline: Timeline, schedule: Schedule) -> int:
    """Return the largest useful control: N_D, or the decode group's stages for B_m."""
    if schedule.layout.policy is AllocationPolicy.RRA:
        return timeline.max_control
    return sum(stage.num_decode_layers > 0 for stage in schedule.stages)


def outcome_of(
    schedule: Schedule, estimates: Estimates, lengths: TaskLengths, estimate: str = CLOSED_FORM
) -> ScheduleOutcome:
    return ScheduleOutcome(
        schedule=schedule,
        estimates=estimates,
        estimate=estimate,
        tokens_per_s=float(estimates.throughput) * lengths.outputs.mean,
    )


@final
@dataclass(frozen=True)
class FamiliesSearch:
    """A `ScheduleSearch` of RRA and continuous batching on one engine, as `Runtime.plan` uses it.

    Args:
      config: the engine's present configuration; its slots and page pool limit the schedules.
      policy: the engine's policy, or the name of a preset.
      families: those to choose from, see `planner_of`.

    Raises:
      InvalidConfigError: see `TaskLengths.check_fits` and `planner_of`.
    """

    times: StepTimes
    config: EngineConfig
    lengths: TaskLengths
    policy: str | SchedulingPolicy = "auto"
    families: tuple[str, ...] = FAMILIES
    _planner: ContinuousPlanner | FamiliesPlanner = field(init=False, repr=False)
    _space: ContinuousSpace | FamiliesSpace = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.lengths.check_fits(self.config)
        player = Player(self.times, get_policy(self.policy), lambda: self.config)
        planner = planner_of(player, self.families)
        object.__setattr__(self, "_planner", planner)
        object.__setattr__(self, "_space", planner.space(self.lengths, ()))

    def best(self, bounds: LatencyBounds) -> ScheduleOutcome:
        plan = self._planner.plan(self.lengths, bounds, num_lengths=0)
        return self._outcome(plan.schedule, self._space.estimated(plan.schedule))

    def estimated(
        self, schedule: Schedule, encode_batch: int, control: int
    ) -> ScheduleOutcome | None:
        if schedule.layout.policy is AllocationPolicy.CONTINUOUS:
            if encode_batch != schedule.encode_batch or not 1 <= control <= self.config.max_slots:
                return None
            return self._outcome(*self._continuous.of(control))
        assert isinstance(self._space, FamiliesSpace), "only it has schedules of RRA"
        timeline = self._space.rra.timeline
        found = _estimated(timeline, schedule, encode_batch, control, self.lengths)
        if found is None:
            return None
        nearest = self._space.nearest(found.schedule)
        return self._outcome(nearest, self._space.estimated(nearest))

    def lowest_s(self, fixed: LatencyBounds) -> float:
        return lowest_latency_s(self._space, fixed)

    def drawn(self, rng: np.random.Generator) -> np.ndarray:
        parts = []
        if isinstance(self._space, FamiliesSpace):
            parts.append(_drawn([self._space.rra.timeline], rng))
        if "continuous" in self.families:
            known = [self._continuous.of(size)[1] for size in self.config.slot_buckets]
            parts.append(np.array([[each.throughput, each.latency_s] for each in known]))
        return np.concatenate(parts)

    @property
    def _continuous(self) -> ContinuousSpace:
        space = self._space
        return space.continuous if isinstance(space, FamiliesSpace) else space

    def _outcome(self, schedule: Schedule, estimates: Estimates) -> ScheduleOutcome:
        return outcome_of(schedule, estimates, self.lengths, SIMULATED)


@final
@dataclass(frozen=True)
class GroupsSearch:
    """A `ScheduleSearch` of WAA on two existing groups, as `Runtime.plan` uses it without moves."""

    times: GroupTimes
    config: EngineConfig
    lengths: TaskLengths
    _planner: WAAPlanner = field(init=False, repr=False)
    _space: WAASpace = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.lengths.check_fits(self.config)
        planner = WAAPlanner(times=self.times, config=lambda: self.config)
        object.__setattr__(self, "_planner", planner)
        object.__setattr__(self, "_space", planner.space(self.lengths, ()))

    def best(self, bounds: LatencyBounds) -> ScheduleOutcome:
        return self._outcome(self._planner.plan(self.lengths, bounds, num_lengths=0).schedule)

    def estimated(
        self, schedule: Schedule, encode_batch: int, control: int
    ) -> ScheduleOutcome | None:
        """Return the outcome for another B_E; `control` is the number of decoding sequences."""
        found = self._space.find(encode_batch, schedule.num_decodes, control)
        return None if found is None else self._outcome(found)

    def lowest_s(self, fixed: LatencyBounds) -> float:
        return lowest_latency_s(self._space, fixed)

    def drawn(self, rng: np.random.Generator) -> np.ndarray:
        estimates = self._space.estimates
        fitting = np.flatnonzero(estimates.fits)
        which = rng.choice(fitting, min(_NUM_DRAWN, len(fitting)), replace=False)
        return np.stack([estimates.throughput[which], estimates.latency_s[which]], axis=1)

    def _outcome(self, schedule: Schedule) -> ScheduleOutcome:
        return outcome_of(schedule, self._space.estimated(schedule), self.lengths)
