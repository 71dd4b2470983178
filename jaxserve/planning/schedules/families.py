"""The best schedule of several families: ExeGPT's RRA, and continuous batching."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from jaxserve.planning.schedules.continuous_planner import ContinuousPlanner, ContinuousSpace
from jaxserve.planning.schedules.lengths import TaskLengths
from jaxserve.planning.schedules.observed import RequestClass
from jaxserve.planning.schedules.plan import SIMULATED, iteration_of
from jaxserve.planning.schedules.planner import SchedulePlanner
from jaxserve.planning.schedules.played import Played, Player
from jaxserve.planning.schedules.rra_planner import RRAPlanner, RRASpace
from jaxserve.planning.schedules.schedule import (
    AllocationPolicy,
    Best,
    Estimates,
    LatencyBounds,
    Schedule,
    check_families,
)
from jaxserve.planning.schedules.search import Score, throughput_under

# Families of one device group.
FAMILIES = ("rra", "continuous")
# RRA fills its batch over several rounds.
_WARM_UP = 4.0
# Most RRA schedules to simulate in a search, and most searches for them by closed form.
_MOST_TRIED = 3
_MOST_SEARCHES = 12
# Share of the best score above which a schedule is simulated: its closed form may be too low.
_WORSE = 0.9
# Start of the search by closed form: its latencies are about this share of the simulated ones.
_CLOSED = 0.93
# Steps by which the bounds of the closed form are widened and tightened.
_WIDER, _TIGHTER = 1.25, 0.93
# Most whole batches (which run until all answers have ended) to simulate in a search, and how far
# the closed form may overestimate their latency.
_MOST_BATCHES = 6
_TOO_LONG = 1.16


def planner_of(
    player: Player, families: Sequence[str] = FAMILIES
) -> ContinuousPlanner | FamiliesPlanner:
    """Return the planner of one engine's schedules.

    Raises:
      InvalidConfigError: there is no family, or one is unknown.
    """
    check_families(families, FAMILIES)
    continuous = ContinuousPlanner(player)
    if "rra" not in families:
        return continuous
    rra = RRAPlanner.measured(player.times, lambda: player.config)
    return FamiliesPlanner(rra, continuous, is_rra_alone="continuous" not in families)


@final
@dataclass(frozen=True)
class FamiliesPlanner(SchedulePlanner):
    """A planner that chooses between RRA and continuous batching, unless `is_rra_alone`.

    Both are simulated in the same way (`Player`), so their throughputs are comparable. Both reserve
    slots for classes of requests with bounds of their own. Simulations have no such requests, so
    the throughputs hold while no reserved slot is in use.
    """

    rra: RRAPlanner
    continuous: ContinuousPlanner
    is_rra_alone: bool = False

    @property
    def max_slots(self) -> int:
        return self.continuous.max_slots

    def space(self, lengths: TaskLengths, classes: Sequence[RequestClass]) -> FamiliesSpace:
        return FamiliesSpace(
            self.rra.space(lengths, classes),
            self.continuous.space(lengths, classes),
            self.is_rra_alone,
        )

    def _chosen(self, space: FamiliesSpace, bounds: LatencyBounds) -> Schedule | None:
        # Simulated throughputs do not tie.
        best = space.best(throughput_under(bounds))
        if best is not None:
            return best
        # Few schedules keep a bound near the lowest feasible one; another search finds this one.
        nearest = self._nearest(space, bounds)
        is_met = nearest is not None and bool(bounds.met(space.estimated(nearest)))
        return nearest if is_met else None


@final
@dataclass(frozen=True)
class FamiliesSpace:
    """The RRA schedules and the limits of continuous batching of one engine.

    The closed form of RRA assumes mean batches and phases, and is up to a third off, in either
    direction, where few sequences run or slots limit them. So the best RRA schedule by closed form
    is simulated, which gives its throughput, and as its latency what 99 % of the simulated answers
    do not exceed. The search is then repeated with bounds scaled by the error of the closed form.
    Schedules whose phases last until all answers have ended (static batches) vary only in their
    batch, which is bisected.
    """

    rra: RRASpace
    continuous: ContinuousSpace
    is_rra_alone: bool = False

    def estimate(self, schedule: Schedule) -> str:
        return SIMULATED

    def best(self, score: Score) -> Schedule | None:
        """Return the schedule with the highest score; None if none is above 0.

        Continuous batching of one sequence is tried only if nothing else keeps the bounds: RRA with
        batches of one does the same in longer decode loops.
        """
        scores: dict[Schedule, float] = {}
        if not self.is_rra_alone:
            self._add(self.continuous.best(score, least=2), score, scores)
        self._try_rounds(score, scores)
        self._try_whole(score, scores)
        if not self.is_rra_alone and not any(scores.values()):
            self._add(self.continuous.best(score), score, scores)
        best = max(scores, key=lambda each: scores[each], default=None)
        return best if best is not None and scores[best] > 0 else None

    def _add(self, found: Schedule | None, score: Score, scores: dict[Schedule, float]) -> None:
        if found is not None:
            scores[found] = float(score(self.estimated(found)))

    def _try_rounds(self, score: Score, scores: dict[Schedule, float]) -> None:
        """Simulate RRA schedules with the best closed forms under several bounds."""
        share, num_tried = _CLOSED, 0
        for _ in range(_MOST_SEARCHES):
            scaled = _scaled(score, 1 / share)
            found = self.rra.best(scaled)
            if found is None:
                share *= _WIDER
                continue
            found = self.rra.static(found)
            if found not in scores:
                closed = self.rra.estimated(found)
                if scaled(closed) < _WORSE * max(scores.values(), default=0.0):
                    return
                figures = self.estimated(found)
                scores[found] = float(score(figures))
                num_tried += 1
                if num_tried == _MOST_TRIED:
                    return
                share = float(closed.latency_s / figures.latency_s)
            elif scores[found] > 0:
                return
            else:
                share *= _TIGHTER

    def _try_whole(self, score: Score, scores: dict[Schedule, float]) -> None:
        """Simulate batches that run until all have ended, for the largest that keeps the bounds.

        The search starts at the closed form. A larger batch serves more and mostly has longer
        latencies; if the first one misses a bound, a larger one is tried before smaller ones.
        """
        first = self._first_whole(score)
        if first is None:
            return
        most = self.rra.whole_timeline.max_encode_batch + 1
        kept, missed, has_looked_up = 0, most, False
        batch, step = first.encode_batch, 1
        num_tried = len(scores) + _MOST_BATCHES
        while missed - kept > 1 and len(scores) < num_tried:
            schedule = self.rra.static(self.rra.nearest(replace(first, encode_batch=batch)))
            possible = _scaled(score, 1 / _TOO_LONG)(self.rra.estimated(schedule))
            is_kept = possible > 0
            if is_kept and possible >= _WORSE * max(scores.values(), default=0.0):
                if schedule not in scores:
                    self._add(schedule, score, scores)
                is_kept = scores[schedule] > 0
            if is_kept:
                kept, missed = batch, missed if batch < missed else most
            else:
                missed = min(missed, batch)
            if missed == most:
                batch = min(most - 1, kept + step)
            elif not kept and not has_looked_up:
                batch, has_looked_up = min(most - 1, missed + 1), True
                continue
            elif not kept:
                batch = max(1, missed - step)
            else:
                batch = (kept + missed) // 2
            step *= 2

    def _first_whole(self, score: Score) -> Schedule | None:
        """Return the best whole batch by closed form, under wider bounds if necessary."""
        share = _CLOSED
        for _ in range(_MOST_SEARCHES):
            found = self.rra.whole(_scaled(score, 1 / share))
            if found is not None:
                return found
            share *= _WIDER
        return None

    def nearest(self, schedule: Schedule) -> Schedule:
        nearest = self._of(schedule).nearest(schedule)
        return (
            nearest
            if nearest.layout.policy is AllocationPolicy.CONTINUOUS
            else self.rra.static(nearest)
        )

    def estimated(self, schedule: Schedule) -> Estimates:
        estimates = self._of(schedule).estimated(schedule)
        if schedule.layout.policy is AllocationPolicy.CONTINUOUS:
            return estimates
        num_reserved = self.continuous.num_reserved
        played = self._play(schedule, num_reserved)
        if num_reserved:
            played = played.or_worse(self._play(_with_more(schedule, num_reserved), 0))
        longer = played.latency_s / estimates.latency_s
        return replace(
            estimates,
            throughput=np.asarray(played.answers_per_s),
            latency_s=np.asarray(played.latency_s),
            token_s=estimates.token_s * longer,
        )

    def _play(self, schedule: Schedule, reserved_slots: int) -> Played:
        return self.continuous.player.play(
            iteration_of(schedule, reserved_slots=reserved_slots),
            self.continuous.lengths,
            schedule.decode_batch + schedule.encode_batch,
            warm_up=_WARM_UP,
        )

    def own_latencies_s(self, schedule: Schedule) -> Sequence[float]:
        return self._of(schedule).own_latencies_s(schedule)

    def _of(self, schedule: Schedule) -> RRASpace | ContinuousSpace:
        is_continuous = schedule.layout.policy is AllocationPolicy.CONTINUOUS
        return self.continuous if is_continuous else self.rra


def _with_more(schedule: Schedule, num: int) -> Schedule:
    share = 1 + num / max(1.0, schedule.decode_batch)
    return replace(
        schedule,
        encode_batch=math.ceil(share * schedule.encode_batch),
        encode_tokens=share * schedule.encode_tokens,
        decode_batch=share * schedule.decode_batch,
    )


def _scaled(score: Score, by: float) -> Score:
    def scaled(figures: Estimates | Best) -> np.ndarray:
        return score(
            replace(figures, latency_s=by * figures.latency_s, token_s=by * figures.token_s)
        )

    return scaled
