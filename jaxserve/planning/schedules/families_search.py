"""The schedules of several families on one engine, for its throughput-latency frontier."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.planning.schedules.configuration import Policy, Schedule
from jaxserve.planning.schedules.continuous_planner import ContinuousSpace
from jaxserve.planning.schedules.estimates import Estimates, LatencyBounds
from jaxserve.planning.schedules.families import FAMILIES, planner_of
from jaxserve.planning.schedules.frontier import EngineSearch, Outcome, outcome_of
from jaxserve.planning.schedules.lengths import TaskLengths
from jaxserve.planning.schedules.plan import SIMULATED
from jaxserve.planning.schedules.planner import SchedulePlanner, ScheduleSpace, lowest_latency_s
from jaxserve.planning.schedules.played import Player
from jaxserve.planning.step_times import StepTimes
from jaxserve.scheduling.policy import Policy as SchedulingPolicy
from jaxserve.scheduling.presets import get_policy


@final
@dataclass(frozen=True)
class FamiliesSearch:
    """A `ScheduleSearch` of RRA and continuous batching on one engine, as `Runtime.plan` has it.

    Args:
      config: the engine's present configuration; its slots and page pool limit the schedules.
      policy: its policy, or the name of a preset.
      families: those to choose from, see `planner_of`.

    Raises:
      InvalidConfigError: see `TaskLengths.check_fits` and `planner_of`.
    """

    times: StepTimes
    config: EngineConfig
    lengths: TaskLengths
    policy: str | SchedulingPolicy = "auto"
    families: tuple[str, ...] = FAMILIES
    _rra: EngineSearch = field(init=False, repr=False)
    _planner: SchedulePlanner = field(init=False, repr=False)
    _space: ScheduleSpace = field(init=False, repr=False)
    _continuous: ContinuousSpace = field(init=False, repr=False)

    def __post_init__(self) -> None:
        player = Player(self.times, get_policy(self.policy), lambda: self.config)
        planner = planner_of(player, self.families)
        made = {
            "_rra": EngineSearch(self.times, self.config, self.lengths),
            "_planner": planner,
            "_space": planner.space(self.lengths, ()),
            "_continuous": ContinuousSpace(player, self.lengths),
        }
        for name, value in made.items():
            object.__setattr__(self, name, value)

    def best(self, bounds: LatencyBounds) -> Outcome:
        plan = self._planner.plan(self.lengths, bounds, num_lengths=0)
        return self._outcome(plan.schedule, self._space.estimated(plan.schedule))

    def estimated(self, schedule: Schedule, encode_batch: int, control: int) -> Outcome | None:
        if schedule.layout.policy is Policy.CONTINUOUS:
            if encode_batch != schedule.encode_batch or not 1 <= control <= self.config.max_slots:
                return None
            return self._outcome(*self._continuous.of(control))
        found = self._rra.estimated(schedule, encode_batch, control)
        if found is None:
            return None
        nearest = self._space.nearest(found.schedule)
        return self._outcome(nearest, self._space.estimated(nearest))

    def lowest_s(self, fixed: LatencyBounds) -> float:
        return lowest_latency_s(self._space, fixed)

    def drawn(self, rng: np.random.Generator) -> np.ndarray:
        parts = []
        if "rra" in self.families:
            parts.append(self._rra.drawn(rng))
        if "continuous" in self.families:
            known = [self._continuous.of(size)[1] for size in self.config.slot_buckets]
            parts.append(np.array([[each.throughput, each.latency_s] for each in known]))
        return np.concatenate(parts)

    def _outcome(self, schedule: Schedule, estimates: Estimates) -> Outcome:
        return outcome_of(schedule, estimates, self.lengths, SIMULATED)
