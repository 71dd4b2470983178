"""The schedules of two groups of devices, for their throughput-latency frontier."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.planning.group_times import GroupTimes
from jaxserve.planning.schedules.configuration import Schedule
from jaxserve.planning.schedules.estimates import LatencyBounds
from jaxserve.planning.schedules.frontier import Outcome, outcome_of
from jaxserve.planning.schedules.lengths import TaskLengths
from jaxserve.planning.schedules.measured_waa import WAAPlanner, WAASpace
from jaxserve.planning.schedules.planner import lowest_latency_s

# Schedules drawn for the background of a picture.
_NUM_DRAWN = 1500


@final
@dataclass(frozen=True)
class GroupsSearch:
    """A `ScheduleSearch` of WAA on two groups that exist, as `Runtime.plan` has it without moves.

    Args:
      config: the engine's present configuration; its slots and page pool limit the schedules.

    Raises:
      InvalidConfigError: see `TaskLengths.check_fits`.
    """

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

    def best(self, bounds: LatencyBounds) -> Outcome:
        return self._outcome(self._planner.plan(self.lengths, bounds, num_lengths=0).schedule)

    def estimated(self, schedule: Schedule, encode_batch: int, control: int) -> Outcome | None:
        """See `ScheduleSearch`; the control is the number of sequences that decode at once."""
        found = self._space.find(encode_batch, schedule.num_decodes, control)
        return None if found is None else self._outcome(found)

    def lowest_s(self, fixed: LatencyBounds) -> float:
        return lowest_latency_s(self._space, fixed)

    def drawn(self, rng: np.random.Generator) -> np.ndarray:
        estimates = self._space.estimates
        fitting = np.flatnonzero(estimates.fits)
        which = rng.choice(fitting, min(_NUM_DRAWN, len(fitting)), replace=False)
        return np.stack([estimates.throughput[which], estimates.latency_s[which]], axis=1)

    def _outcome(self, schedule: Schedule) -> Outcome:
        return outcome_of(schedule, self._space.estimated(schedule), self.lengths)
