"""The best schedule of several families: ExeGPT's RRA, and continuous batching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np

from jaxserve.planning.schedules.candidate import Score, throughput_under
from jaxserve.planning.schedules.configuration import Policy, Schedule, check_families
from jaxserve.planning.schedules.continuous_planner import ContinuousPlanner, ContinuousSpace
from jaxserve.planning.schedules.estimates import Estimates, LatencyBounds
from jaxserve.planning.schedules.iterations import iteration_of
from jaxserve.planning.schedules.lengths import TaskLengths
from jaxserve.planning.schedules.observed import RequestClass
from jaxserve.planning.schedules.plan import SIMULATED, SIMULATED_RATE
from jaxserve.planning.schedules.planner import SchedulePlanner, ScheduleSpace
from jaxserve.planning.schedules.played import Player
from jaxserve.planning.schedules.rra_planner import RRAPlanner

# Families of one device group.
FAMILIES = ("rra", "continuous")
# RRA fills its batch over several rounds.
_WARM_UP = 4.0


def planner_of(
    player: Player, families: Sequence[str] = FAMILIES
) -> RRAPlanner | ContinuousPlanner | FamiliesPlanner:
    """Return the planner of one engine's schedules of some families.

    Args:
      player: simulates the engine.

    Raises:
      InvalidConfigError: there is no family, or one is unknown.
    """
    check_families(families, FAMILIES)
    rra = RRAPlanner.measured(player.times, lambda: player.config)
    if set(families) == {"rra"}:
        return rra
    continuous = ContinuousPlanner(player)
    return continuous if set(families) == {"continuous"} else FamiliesPlanner(rra, continuous)


@final
@dataclass(frozen=True)
class FamiliesPlanner(SchedulePlanner):
    """A planner of one engine that chooses between RRA and continuous batching.

    Both are simulated in the same way (`Player`), so that their throughputs are comparable. Both
    reserve slots for classes of requests with bounds of their own. Simulations have requests
    without such bounds only, so the throughputs are of these alone while no reserved slot is in
    use.
    """

    plans_classes: ClassVar[bool] = True

    rra: RRAPlanner
    continuous: ContinuousPlanner

    @property
    def max_slots(self) -> int:
        return self.continuous.max_slots

    def space(self, lengths: TaskLengths, classes: Sequence[RequestClass]) -> FamiliesSpace:
        return FamiliesSpace(
            self.rra.space(lengths, classes),
            self.continuous.space(lengths, classes),
        )

    def _chosen(self, space: ScheduleSpace, bounds: LatencyBounds) -> Schedule | None:
        # Simulated throughputs are never equal.
        return space.best(throughput_under(bounds))


@final
@dataclass(frozen=True)
class FamiliesSpace:
    """The RRA schedules and the limits of continuous batching of one engine.

    The RRA schedule that is best by its closed form is simulated, too, and compared by that
    throughput. Its latencies stay those of the closed form.
    """

    rra: ScheduleSpace
    continuous: ContinuousSpace

    def estimate(self, schedule: Schedule) -> str:
        return SIMULATED if schedule.layout.policy is Policy.CONTINUOUS else SIMULATED_RATE

    def best(self, score: Score) -> Schedule | None:
        found = [each.best(score) for each in (self.continuous, self.rra)]
        scores = {each: float(score(self.estimated(each))) for each in found if each is not None}
        best = max(scores, key=lambda each: scores[each], default=None)
        return best if best is not None and scores[best] > 0 else None

    def nearest(self, schedule: Schedule) -> Schedule:
        return self._of(schedule).nearest(schedule)

    def estimated(self, schedule: Schedule) -> Estimates:
        estimates = self._of(schedule).estimated(schedule)
        if schedule.layout.policy is Policy.CONTINUOUS:
            return estimates
        played = self.continuous.player.play(
            iteration_of(schedule, reserved_slots=self.continuous.num_reserved),
            self.continuous.lengths,
            schedule.decode_batch + schedule.encode_batch,
            warm_up=_WARM_UP,
        )
        return replace(estimates, throughput=np.asarray(played.answers_per_s))

    def own_latencies_s(self, schedule: Schedule) -> Sequence[float]:
        return self._of(schedule).own_latencies_s(schedule)

    def _of(self, schedule: Schedule) -> ScheduleSpace:
        is_continuous = schedule.layout.policy is Policy.CONTINUOUS
        return self.continuous if is_continuous else self.rra
