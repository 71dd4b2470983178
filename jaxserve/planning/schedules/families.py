"""The best schedule of several families: ExeGPT's RRA, and continuous batching."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, final

import numpy as np

from jaxserve.core.errors import InvalidConfigError
from jaxserve.planning.schedules.candidate import Score, shortest, throughput_under
from jaxserve.planning.schedules.configuration import Policy, Schedule
from jaxserve.planning.schedules.continuous_planner import (
    ContinuousPlanner,
    ContinuousSpace,
    estimates_of,
)
from jaxserve.planning.schedules.estimates import Best, Estimates, LatencyBounds
from jaxserve.planning.schedules.iterations import iteration_of
from jaxserve.planning.schedules.lengths import TaskLengths
from jaxserve.planning.schedules.observed import RequestClass
from jaxserve.planning.schedules.plan import CLOSED_FORM, SIMULATED
from jaxserve.planning.schedules.planner import SchedulePlanner, ScheduleSpace
from jaxserve.planning.schedules.played import Player
from jaxserve.planning.schedules.rra_planner import RRAPlanner

# Families of one device group.
FAMILIES = ("rra", "continuous")
_LATENCIES = ("latency_s", "first_token_s", "token_s")


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


def check_families(families: Sequence[str], allowed: Sequence[str]) -> None:
    """Check that there are families, and that each is one of those allowed.

    Raises:
      InvalidConfigError
    """
    if isinstance(families, str) or not families or not set(families) <= set(allowed):
        raise InvalidConfigError(
            f"policies={families!r} is not allowed here; pass some of {tuple(allowed)}, or None "
            "for all of them"
        )


@final
@dataclass(frozen=True)
class FamiliesPlanner(SchedulePlanner):
    """A planner of one engine that chooses between RRA and continuous batching.

    Both are simulated in the same way (`Player`), so that their figures are comparable. With
    classes of requests with bounds of their own it offers RRA only, whose schedules reserve slots
    for them; its figures are then those of the closed form.
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
            self.continuous.space(lengths, ()),
            num_classes=len(classes),
        )

    def _chosen(self, space: ScheduleSpace, bounds: LatencyBounds) -> Schedule | None:
        # Simulated throughputs are never equal.
        return space.best(throughput_under(bounds))


@final
@dataclass(frozen=True)
class FamiliesSpace:
    """The RRA schedules and the limits of continuous batching of one engine.

    An RRA schedule is found by its closed form, and simulated. What that differs by corrects the
    closed form, and the search runs once more. Where neither of both keeps the bounds, the RRA
    schedules with the lowest latencies are simulated.
    """

    rra: ScheduleSpace
    continuous: ContinuousSpace
    num_classes: int = 0
    _simulated: dict[Schedule, Estimates] = field(default_factory=dict, repr=False)

    @property
    def estimate(self) -> str:
        return CLOSED_FORM if self.num_classes else SIMULATED

    def best(self, score: Score) -> Schedule | None:
        if self.num_classes:
            return self.rra.best(score)
        found = [self.continuous.best(score), self._best_rra(score)]
        best, most = None, 0.0
        for schedule in found:
            if schedule is not None and (own := float(score(self.estimated(schedule)))) > most:
                best, most = schedule, own
        return best

    def nearest(self, schedule: Schedule) -> Schedule:
        return self._of(schedule).nearest(schedule)

    def estimated(self, schedule: Schedule) -> Estimates:
        if schedule.layout.policy is Policy.CONTINUOUS:
            estimates = self.continuous.estimated(schedule)
            # It has no place for requests with bounds of their own.
            return replace(estimates, own_share=np.float64(math.inf if self.num_classes else 0.0))
        if self.num_classes:
            return self.rra.estimated(schedule)
        if schedule not in self._simulated:
            self._simulated[schedule] = self._played(schedule)
        return self._simulated[schedule]

    def own_latencies_s(self, schedule: Schedule) -> Sequence[float]:
        if schedule.layout.policy is Policy.CONTINUOUS:
            return [math.inf] * self.num_classes
        return self.rra.own_latencies_s(schedule)

    def _of(self, schedule: Schedule) -> ScheduleSpace:
        is_continuous = schedule.layout.policy is Policy.CONTINUOUS
        return self.continuous if is_continuous else self.rra

    def _best_rra(self, score: Score) -> Schedule | None:
        first = self.rra.best(score)
        if first is not None:
            again = self.rra.best(_corrected(score, self._errors(first)))
            if again is not None:
                self.estimated(again)
        if not any(score(figures) > 0 for figures in self._simulated.values()):
            for name in _LATENCIES:
                if (fastest := self.rra.best(shortest(name))) is not None:
                    self.estimated(fastest)
        if not self._simulated:
            return None
        return max(self._simulated, key=lambda each: float(score(self._simulated[each])))

    def _errors(self, schedule: Schedule) -> dict[str, float]:
        """Return the simulated figures of an RRA schedule over those of the closed form."""
        closed, simulated = self.rra.estimated(schedule), self.estimated(schedule)
        names = ("throughput", *_LATENCIES)
        return {
            name: float(getattr(simulated, name)) / max(float(getattr(closed, name)), 1e-12)
            for name in names
        }

    def _played(self, schedule: Schedule) -> Estimates:
        player, lengths = self.continuous.player, self.continuous.lengths
        closed = self.rra.estimated(schedule)
        played = player.play(
            iteration_of(schedule),
            lengths,
            schedule.decode_batch + schedule.encode_batch,
            joins_at_once=False,
        )
        simulated = estimates_of(played, schedule, lengths, player.room)
        return replace(
            simulated,
            fits=simulated.fits & closed.fits,
            memory_bytes=closed.memory_bytes,
        )


def _corrected(score: Score, errors: dict[str, float]) -> Score:
    """Return the score of figures that are multiplied by `errors`, by name."""

    def corrected(figures: Estimates | Best) -> np.ndarray:
        changed = {name: getattr(figures, name) * error for name, error in errors.items()}
        return score(replace(figures, **changed))

    return corrected
