"""WAA schedules of an engine whose devices can be divided between its two groups in several ways.

ExeGPT moves devices and layers between the groups when lengths change (section 5.2). Here a move
drops the KV of running sequences, which is recomputed, and pauses the engine while weights are
placed. So another division must serve enough more to pay for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.planning.schedules.lengths import TaskLengths
from jaxserve.planning.schedules.measured_waa import WAAPlanner, encode_s, iteration_s
from jaxserve.planning.schedules.observed import RequestClass
from jaxserve.planning.schedules.plan import CLOSED_FORM, Move, SchedulePlan
from jaxserve.planning.schedules.planner import SchedulePlanner, ScheduleSpace, chosen
from jaxserve.planning.schedules.schedule import (
    AllocationPolicy,
    Division,
    Estimates,
    LatencyBounds,
    Schedule,
)
from jaxserve.planning.schedules.search import Score, nearest_to
from jaxserve.planning.step_times import GroupTimes


@final
@dataclass(frozen=True, kw_only=True)
class DivisionRule:
    """Divides devices in proportion to the costs of each encode batch.

    WAA-C divides the computation: an encode phase of B_E sequences, and the decode iterations that
    B_E answers of S_D iterations take. One iteration of B_D = B_E S_D sequences suffices, as in the
    paper; fewer slots need proportionally more iterations. WAA-M divides the memory: a copy of the
    weights in each group, the KV of two encode batches, and that of B_D sequences.

    Attributes:
      policy: `AllocationPolicy.WAA_C` or `AllocationPolicy.WAA_M`.
      token_bytes: KV of a token in all layers.
    """

    policy: AllocationPolicy
    weights_bytes: int
    token_bytes: float

    def divisions(
        self, options: Sequence[Division], times: GroupTimes, lengths: TaskLengths, max_slots: int
    ) -> list[Division]:
        """Return the division for a B_E of 1, 2, ... `max_slots` with the least load per device.

        Of equal ones it is that with more devices. `times` are those of the first option's groups.
        """
        batch = np.arange(1, max_slots + 1, dtype=np.float64)
        iterations = lengths.outputs.less_one()
        num_decoding = np.minimum(batch * max(iterations.mean, 1.0), max_slots)
        length = lengths.inputs.mean + iterations.mean_position
        if self.policy is AllocationPolicy.WAA_C:
            encode = encode_s(times, lengths, batch) * options[0].encode
            by_number = iteration_s(times, lengths, [1], max_slots)[0]
            num_iterations = batch * max(iterations.mean, 1.0) / num_decoding
            iteration = np.interp(num_decoding, batch, by_number)
            decode = num_iterations * iteration * options[0].decode
        else:
            encode_tokens = 2 * batch * lengths.inputs.mean
            encode = self.weights_bytes + encode_tokens * self.token_bytes
            decode = self.weights_bytes + num_decoding * length * self.token_bytes
        share = encode / (encode + decode)
        order = sorted(options, key=lambda each: -(each.encode + each.decode))
        sizes = np.array([[each.encode, each.decode] for each in order])
        parts = np.stack([share, 1 - share], axis=1)
        most = (parts[:, None] / sizes[None]).max(axis=2)
        return [order[index] for index in most.argmin(axis=1)]


# Factors by which another division must serve more, by measured and by derived times.
_GAIN = 1.1
_GAIN_IF_DERIVED = 1.25
# Seconds within which a move must pay for its pause and for recomputed KV.
_HORIZON_S = 300.0


@final
@dataclass(frozen=True, kw_only=True)
class DivisionOption:
    """A division of the devices that the engine can have.

    Attributes:
      times: step times of groups of these sizes.
      pause_s: expected seconds of the engine's pause for the move; 0 for the present division.
      is_measured: whether the step times of both sizes were measured.
      refused: why the engine cannot have it now; empty if it can.
    """

    division: Division
    times: GroupTimes
    num_pages: int
    pause_s: float = 0.0
    is_measured: bool = True
    refused: str = ""


@final
@dataclass(frozen=True, kw_only=True)
class DividedPlanner(SchedulePlanner):
    """A planner of the WAA schedules of every division of an engine's devices.

    It chooses the best schedule of the division that serves the most if the move pays, otherwise
    the best schedule of the present division.

    Attributes:
      options: returns the divisions, the present one first.
      max_pause_s: the longest expected pause of an allowed move.
      rules: rules of WAA-C, WAA-M or both; devices move only to a division that one of them gives.
        Without rules every division is compared.
    """

    options: Callable[[], Sequence[DivisionOption]]
    config: Callable[[], EngineConfig]
    num_moves: Callable[[], int]
    max_pause_s: float
    rules: Sequence[DivisionRule] = ()

    @property
    def max_slots(self) -> int:
        return self.config().max_slots

    def space(self, lengths: TaskLengths, classes: Sequence[RequestClass]) -> DividedSpace:
        # Read first, so that a move during the search invalidates the plan.
        num_moves = self.num_moves()
        options = {option.division: option for option in self.options()}
        config = self.config()

        allowed = self._allowed(tuple(options.values()), lengths, config.max_slots)
        policy = self.rules[0].policy if self.rules else AllocationPolicy.WAA_C

        def space_of(division: Division) -> ScheduleSpace:
            option = options[division]
            own = replace(config, num_pages=option.num_pages)
            planner = WAAPlanner(
                times=option.times, config=lambda: own, policy=policy, allowed=allowed[division]
            )
            return planner.space(lengths, classes)

        return DividedSpace(
            spaces=_Spaces(tuple(allowed), space_of),
            options=options,
            max_pause_s=self.max_pause_s,
            num_moves=num_moves,
        )

    def staying(self) -> DividedPlanner:
        return replace(self, max_pause_s=0.0)

    def _allowed(
        self, options: Sequence[DivisionOption], lengths: TaskLengths, max_slots: int
    ) -> dict[Division, np.ndarray]:
        """Return the B_E that the rules allow, [slots], by division; the present one allows all."""
        present, *others = [option.division for option in options]
        every = np.ones(max_slots, bool)
        if not self.rules:
            return dict.fromkeys([present, *others], every)
        times = options[0].times
        given = [
            rule.divisions([present, *others], times, lengths, max_slots) for rule in self.rules
        ]
        found = {each: np.any([[g == each for g in by] for by in given], axis=0) for each in others}
        return {present: every} | {each: batch for each, batch in found.items() if batch.any()}

    def _chosen(self, space: DividedSpace, bounds: LatencyBounds) -> Schedule | None:
        return space.chosen(bounds)[0]

    def _nearest(self, space: DividedSpace, bounds: LatencyBounds) -> Schedule | None:
        return space.nearest_to(bounds)[0]

    def _finished(self, plan: SchedulePlan, space: DividedSpace) -> SchedulePlan:
        keeps = plan.keeps_bounds
        judged = space.chosen(plan.bounds) if keeps else space.nearest_to(plan.bounds)
        return replace(plan, move=judged[1], num_moves=space.num_moves)

    def _as_it_stands(self, plan: SchedulePlan, space: DividedSpace) -> SchedulePlan:
        return replace(plan, num_moves=space.num_moves)  # it is for the present groups


@final
class _Spaces(Mapping[Division, ScheduleSpace]):
    """The schedules of each division, made on demand; only the newest are kept.

    Their figures take tens of megabytes, and eight devices have dozens of divisions.
    """

    def __init__(self, divisions: Sequence[Division], make: Callable[[Division], ScheduleSpace]):
        self._divisions = tuple(divisions)
        self._make = make
        self._newest: tuple[Division, ScheduleSpace] | None = None

    def __getitem__(self, division: Division) -> ScheduleSpace:
        if division not in self._divisions:
            raise KeyError(division)
        if self._newest is None or self._newest[0] != division:
            self._newest = None  # free it first, so that only one is in memory
            self._newest = division, self._make(division)
        return self._newest[1]

    def __iter__(self) -> Iterator[Division]:
        return iter(self._divisions)

    def __len__(self) -> int:
        return len(self._divisions)


@final
@dataclass(frozen=True, kw_only=True)
class DividedSpace:
    """The WAA schedules of every division, the present one first, and when one is worth a move."""

    spaces: Mapping[Division, ScheduleSpace]
    options: Mapping[Division, DivisionOption]
    max_pause_s: float
    num_moves: int

    @property
    def present(self) -> Division:
        return next(iter(self.spaces))

    def chosen(self, bounds: LatencyBounds) -> tuple[Schedule | None, Move | None]:
        """Return the schedule that serves the most under bounds, if any, and its move.

        The move says why if a better division is not worth it.
        """
        return self._judged(lambda space: chosen(space, bounds), lambda of: of.throughput)

    def nearest_to(self, bounds: LatencyBounds) -> tuple[Schedule | None, Move | None]:
        """Return the schedule that misses the bounds least, and the move; see `chosen`."""
        score = nearest_to(bounds)
        return self._judged(lambda space: space.best(score), score)

    def _judged(
        self,
        best: Callable[[ScheduleSpace], Schedule | None],
        value: Callable[[Estimates], np.ndarray],
    ) -> tuple[Schedule | None, Move | None]:
        """Choose among each division's best schedule; the values rise with their quality."""
        found: dict[Division, Schedule | None] = {}
        values: dict[Division, float] = {}
        for division, space in self.spaces.items():
            schedule = found[division] = best(space)
            if schedule is not None:
                values[division] = float(value(space.estimated(schedule)))
        present = self.present
        first: Move | None = None
        for division in sorted(values, key=lambda each: -values[each]):
            schedule = found[division]
            if division == present or schedule is None or values[division] <= 0:
                break
            move = self._move(division, schedule, values[division], values.get(present, 0.0))
            if not move.refused:
                return replace(schedule, division=division), move
            first = first or move
        kept = found[present]
        return None if kept is None else replace(kept, division=present), first

    def _move(self, division: Division, schedule: Schedule, value: float, now: float) -> Move:
        option = self.options[division]
        gain = value / now if now else math.inf
        needed = _GAIN if option.is_measured else _GAIN_IF_DERIVED
        figures = self.spaces[division].estimated(schedule)
        tokens_per_s = schedule.encode_tokens / float(figures.encode_s)
        # Memory is in tokens, which are recomputed.
        cost_s = option.pause_s + float(figures.memory_bytes) / tokens_per_s
        refused = option.refused
        if not refused and option.pause_s > self.max_pause_s:
            refused = (
                f"it would pause the engine for {option.pause_s:.3g} s, and max_pause_s is "
                f"{self.max_pause_s:.3g}"
            )
        elif not refused and gain * (1 - cost_s / _HORIZON_S) <= needed:
            refused = (
                f"it would be {gain:.3g} times as good, and has to be {needed:.3g} times as good "
                f"over {_HORIZON_S:.0f} s, of which a move takes {cost_s:.3g} s"
            )
        return Move(
            present=self.present,
            division=division,
            gain=gain,
            expected_pause_s=option.pause_s,
            max_pause_s=self.max_pause_s,
            is_measured=option.is_measured,
            refused=refused,
        )

    # ---- the protocol of `ScheduleSpace` ----

    def estimate(self, schedule: Schedule) -> str:
        return CLOSED_FORM

    def best(self, score: Score) -> Schedule | None:
        best, most = None, 0.0
        for division, space in self.spaces.items():
            option = self.options[division]
            if option.refused or option.pause_s > self.max_pause_s:
                continue
            found = space.best(score)
            value = 0.0 if found is None else float(score(space.estimated(found)))
            if found is not None and value > most:
                best, most = replace(found, division=division), value
        return best

    def nearest(self, schedule: Schedule) -> Schedule:
        """Return the schedule of the same division, or of the present one if that is gone."""
        division = schedule.division
        if division is None or division not in self.spaces:
            division = self.present
        return replace(self.spaces[division].nearest(schedule), division=division)

    def estimated(self, schedule: Schedule) -> Estimates:
        assert schedule.division is not None
        return self.spaces[schedule.division].estimated(schedule)

    def own_latencies_s(self, schedule: Schedule) -> Sequence[float]:
        assert schedule.division is not None
        return self.spaces[schedule.division].own_latencies_s(schedule)
