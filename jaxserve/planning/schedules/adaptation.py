"""Plan updates that follow the lengths of the newest answers."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import final

import numpy as np

from jaxserve.core.errors import DeviceMemoryError
from jaxserve.engine.engine import Engine
from jaxserve.planning.schedules.drift import (
    Lifetimes,
    drift,
    kaplan_meier,
    num_known,
    share_beyond,
)
from jaxserve.planning.schedules.lengths import LengthDistribution, TaskLengths, cautious_level
from jaxserve.planning.schedules.observed import (
    AnswerLength,
    RequestClass,
    answer_lengths,
    classes_of,
    tightest,
    unfinished,
)
from jaxserve.planning.schedules.plan import SchedulePlan
from jaxserve.planning.schedules.planner import SchedulePlanner
from jaxserve.planning.schedules.schedule import LatencyBounds
from jaxserve.planning.simulator import Ended

_log = logging.getLogger(__name__)

# Fewest answers that a plan needs; also the smallest window that is tested.
LEAST_ANSWERS = 64
# Ended answers between two tests.
_INTERVAL = 32
# Newest answers to keep. More make no better plan.
_MOST = 4096
# Largest share of answers that may be longer than every ended answer when a plan is made.
_MOST_UNKNOWN = 0.002
# Factor by which another schedule must serve more, or miss its bounds less, to be adopted.
# A smaller gain is within the error of the estimates.
_GAIN = 1.02
# Fewest answers for adopting a schedule that only serves more. The window that differs most
# overstates the change, so the schedule of a small window may miss the bound.
_LEAST_FOR_GAIN = 256
# Relative difference from which on the runner's target sizes are adjusted.
_UNEVEN = 0.05


@final
class Adaptation:
    """Decides when the newest answers require another schedule, and finds it. Not thread-safe.

    After every 32 ended answers the newest admitted answers are compared with those of the plan, in
    windows of 64, 128, 256, ... answers, so that a large change shows soon and a small one later.
    The test (`drift`) covers prompts and answers; running answers count with their present length.
    If it shows a change, the next search uses the window that differs most, and older answers are
    dropped. Without a change, the search repeats when the answers since the first ones have
    doubled, because more answers say more about the longest ones.

    The search also repeats when an answer had a tighter latency bound of its own than all answers
    of the last search, or, while these are few, when twice as many answers have had one.

    Hysteresis: another schedule is adopted only if the present one is expected to miss a bound, to
    exceed the memory, or, by the lengths of 256 answers or more, to serve 2 % less. If no schedule
    keeps the bounds, the one that misses them least serves, and a warning says so.

    Args:
      plan: the present plan; None to plan from the first answers.
      answers: those that the plan was computed from, and those that were running then.
      begins_s: answers admitted until then count only if they are in `answers`, because only the
        long ones would end later.
      heeds_bounds: whether the order of the engine's policy heeds latency bounds of single requests
        (`Order.heeds_bounds`); if not, they are left out.

    Attributes:
      plan: the plan in force, with its expected figures for the newest lengths.
      num_searches: how often the search ran.
    """

    def __init__(
        self,
        planner: SchedulePlanner,
        bounds: LatencyBounds,
        *,
        plan: SchedulePlan | None = None,
        answers: Sequence[AnswerLength] = (),
        begins_s: float = -np.inf,
        heeds_bounds: bool = True,
    ):
        self.plan = plan
        self.num_searches = 0
        self._planner = planner
        self._bounds = bounds
        self._begins_s = begins_s
        self._heeds_bounds = heeds_bounds
        self._known = list(answers[-_MOST:])
        self._since: list[AnswerLength] = []
        self._num_untested = 0
        self._is_refused = False
        # The tightest bounds of single answers in the last search, and how many answers had one.
        self._tightest = _tightest([], self._known)
        self._num_bounded = _num_bounded(self._known)

    def observe(self, answers: Iterable[AnswerLength]) -> bool:
        """Add ended answers; return whether `revised` should be called."""
        num_before = len(self._since)
        self._since += [answer for answer in answers if answer.admitted_s > self._begins_s]
        self._num_untested += len(self._since) - num_before
        del self._since[:-_MOST]
        return self._num_untested >= _INTERVAL

    def revised(self, running: Sequence[AnswerLength]) -> SchedulePlan | None:
        """Test the newest and `running` answers; return a plan to adopt, or None for no change."""
        self._num_untested = 0
        known, newest = self._split(running)
        if sum(answer.has_ended for answer in (*known, *newest)) < LEAST_ANSWERS:
            return None
        changed = _changed(known, newest)
        is_due = (
            self.plan is None or len(newest) >= len(known) or self._has_other_bounds(known, newest)
        )
        is_due |= self._is_refused and len(newest) >= LEAST_ANSWERS
        if changed is None and not is_due:
            return None
        lengths = _newest([*known, *newest], _MOST) if changed is None else changed
        if not _is_known(lengths):
            return None
        task = task_of(lengths)
        self.num_searches += 1
        self._tightest, self._num_bounded = _tightest([], lengths), _num_bounded(lengths)
        classes = classes_of(lengths, self._planner.max_slots) if self._heeds_bounds else ()
        try:
            plan = self._nearest(task, len(lengths), classes)
            while classes and not plan.keeps_bounds:
                possible = self._planner.possible(task, self._bounds, classes)
                if len(possible) == len(classes):
                    break
                classes = possible
                plan = self._nearest(task, len(lengths), classes)
        except DeviceMemoryError as error:
            _log.warning("the schedule stays, because the newest lengths have no plan: %s", error)
            return None
        self._known, self._since, self._is_refused = lengths, [], False
        if changed is not None:
            self._begins_s = max(self._begins_s, np.nextafter(lengths[0].admitted_s, -np.inf))
        return self._adopted(plan, task)

    def _has_other_bounds(
        self, known: Sequence[AnswerLength], newest: Sequence[AnswerLength]
    ) -> bool:
        """Return whether the newest answers have tighter bounds, or many more have bounds."""
        if not self._heeds_bounds:
            return False
        num = _num_bounded(known) + _num_bounded(newest)
        # Once half of the slots are reserved, more answers with bounds reserve no more.
        before = self._num_bounded
        has_more = 2 * before < self._planner.max_slots and num > before and num >= 2 * before
        return has_more or _tightest([self._tightest], newest) != self._tightest

    def _nearest(
        self, task: TaskLengths, num: int, classes: Sequence[RequestClass]
    ) -> SchedulePlan:
        return self._planner.nearest(task, self._bounds, num_lengths=num, classes=classes)

    def keep(self, plan: SchedulePlan | None) -> None:
        """Set the plan that is in force."""
        self.plan = plan

    def on_other_groups(self) -> Adaptation:
        """Return a copy for other, fixed device groups, without a plan. Any thread may call it.

        It has the same answers, so its search runs at the next test.
        """
        return Adaptation(
            self._planner.staying(),
            self._bounds,
            answers=[*self._known, *self._since],
            begins_s=self._begins_s,
            heeds_bounds=self._heeds_bounds,
        )

    def refuse(self, before: SchedulePlan | None) -> None:
        """Restore the previous plan; the search runs again after `LEAST_ANSWERS` answers."""
        self.plan = before
        self._is_refused = True

    def _split(
        self, running: Sequence[AnswerLength]
    ) -> tuple[list[AnswerLength], list[AnswerLength]]:
        """Return the plan's answers with their present lengths, and those admitted later."""
        last_s = max((answer.admitted_s for answer in self._known), default=-np.inf)
        now = [answer for answer in running if answer.admitted_s > self._begins_s]
        now = sorted((*self._since, *now), key=lambda answer: answer.admitted_s)
        known = [answer for answer in self._known if answer.has_ended]
        known += [answer for answer in now if answer.admitted_s <= last_s]
        known.sort(key=lambda answer: answer.admitted_s)
        return known, [answer for answer in now if answer.admitted_s > last_s]

    def _adopted(self, plan: SchedulePlan, task: TaskLengths) -> SchedulePlan | None:
        """Choose between a new plan and the present one; return it if the runner must change."""
        if self.plan is None:
            _warn(None, plan)
            self.plan = plan
            return plan
        present = self._planner.expected(
            self.plan,
            task,
            num_lengths=plan.num_lengths,
            classes=[each for each, _ in plan.classes],
        )
        if not present.fits:
            is_better = True
        elif present.keeps_bounds:
            is_more = plan.answers_per_s >= _GAIN * present.answers_per_s
            is_better = plan.keeps_bounds and is_more and plan.num_lengths >= _LEAST_FOR_GAIN
        else:
            is_better = plan.keeps_bounds or _GAIN * plan.worst_share <= present.worst_share
        before = self.plan
        # Keep what is known about the last move of devices.
        lowest = {} if present.keeps_bounds else plan.lowest
        self.plan = plan if is_better else replace(present, lowest=lowest, move=before.move)
        _warn(before, self.plan)
        return self.plan if is_better or _is_uneven(before, present) else None


def _changed(
    known: Sequence[AnswerLength], newest: Sequence[AnswerLength]
) -> list[AnswerLength] | None:
    """Return the window of newest answers that differs most; None if no window differs."""
    if not known or len(newest) < LEAST_ANSWERS:
        return None
    known_prompts, known_outputs = _lifetimes(known)
    worst, changed, size = 1.0, None, LEAST_ANSWERS
    while size < 2 * len(newest):
        window = _newest(newest, size)
        prompts, outputs = _lifetimes(window)
        found = max(drift(known_prompts, prompts), drift(known_outputs, outputs))
        if found > worst and _is_known(window):
            worst, changed = found, window
        size *= 2
    return changed


def _newest(answers: Sequence[AnswerLength], num: int) -> list[AnswerLength]:
    """Return at least `num` answers, those admitted last; `answers` is in order of admission.

    Answers admitted together stay together, because a cut between them would prefer short ones.
    """
    if len(answers) <= num:
        return list(answers)
    first = bisect.bisect_left(answers, answers[-num].admitted_s, key=lambda each: each.admitted_s)
    return list(answers[first:])


def _is_known(answers: Sequence[AnswerLength]) -> bool:
    """Return whether answers longer than every ended one are few or predicted enough for a plan."""
    others = [answer for answer in answers if answer.has_ended or answer.estimate is None]
    return not others or share_beyond(_lifetimes(others)[1]) <= _MOST_UNKNOWN


def _tightest(known: Sequence[LatencyBounds], answers: Sequence[AnswerLength]) -> LatencyBounds:
    return tightest([LatencyBounds(), *known, *(a.bounds for a in answers if a.has_ended)])


def _num_bounded(answers: Sequence[AnswerLength]) -> int:
    return sum(answer.has_ended and answer.bounds != LatencyBounds() for answer in answers)


def task_of(answers: Sequence[AnswerLength]) -> TaskLengths:
    """Return the length distributions of answers, some still running, with a cautious level."""
    prompts = LengthDistribution.of_samples([answer.num_prompt for answer in answers])
    told = [answer for answer in answers if not answer.has_ended and answer.estimate is not None]
    others = [answer for answer in answers if answer.has_ended or answer.estimate is None]
    size = 1 + max(answer.num_output for answer in answers)
    expected = [_expected(answer) for answer in told]
    size = max(size, *(len(each) for each in expected)) if expected else size
    total, num = np.zeros(size), float(len(told))
    if others:
        _, lifetimes = _lifetimes(others)
        probabilities = kaplan_meier(lifetimes)
        total[: len(probabilities)] += len(others) * probabilities
        num += num_known(lifetimes, 0.01)
    for each in expected:
        total[: len(each)] += each
    return TaskLengths(prompts, LengthDistribution(total), level=cautious_level(num))


def _expected(answer: AnswerLength) -> np.ndarray:
    assert answer.estimate is not None
    prediction, at = answer.estimate.prediction, answer.estimate.at
    ahead = LengthDistribution.of_predictions(prediction.distribution).probabilities
    whole = np.concatenate([np.zeros(at), ahead])
    whole[: answer.num_output + 1] = 0.0
    if not whole.any():  # it is longer than predicted
        whole = np.zeros(answer.num_output + 2)
        whole[-1] = 1.0
    if answer.limit is not None and len(whole) > answer.limit + 1:
        beyond = whole[answer.limit + 1 :].sum()
        whole = whole[: answer.limit + 1]
        whole[answer.limit] += beyond
    return whole / whole.sum()


def _lifetimes(answers: Sequence[AnswerLength]) -> tuple[Lifetimes, Lifetimes]:
    """Return the lengths of prompts, which are whole, and of outputs."""
    prompts = np.array([answer.num_prompt for answer in answers], np.int64)
    outputs = np.array([answer.num_output for answer in answers], np.int64)
    has_ended = np.array([answer.has_ended for answer in answers], bool)
    return Lifetimes.whole(prompts), Lifetimes(outputs, has_ended)


def _is_uneven(before: SchedulePlan, after: SchedulePlan) -> bool:
    """Return whether target sizes or reserved slots changed much; False for continuous batching."""
    if before.iteration() == after.iteration():
        return False
    pairs = (
        (before.schedule.encode_tokens, after.schedule.encode_tokens),
        (before.schedule.decode_batch, after.schedule.decode_batch),
    )
    reserved = before.reserved_slots, after.reserved_slots
    return reserved[0] != reserved[1] or any(abs(new - old) > _UNEVEN * old for old, new in pairs)


def _warn(before: SchedulePlan | None, after: SchedulePlan) -> None:
    kept_before = before is None or before.keeps_bounds
    if kept_before and not after.keeps_bounds:
        _log.warning(
            "%s; the one that misses them least serves (%s)", after.missed, after.summary()
        )
    elif after.keeps_bounds and not kept_before:
        _log.warning("the latency bounds are expected to be kept again: %s", after.summary())


@final
class AdaptingPilot:
    """A `simulator.Pilot` that adapts the plan to the newest lengths, as a runtime does.

    A search takes `search_s` virtual seconds, during which the engine serves. `adopted` has the
    (virtual seconds, plan) of each adoption.
    """

    def __init__(self, adaptation: Adaptation, *, search_s: float = 0.5):
        self.adopted: list[tuple[float, SchedulePlan]] = []
        self._adaptation = adaptation
        self._search_s = search_s
        self._next: tuple[float, SchedulePlan] | None = None

    def after_step(self, engine: Engine, ended: Sequence[Ended], now_s: float) -> None:
        lengths = [length for each in ended for length in answer_lengths(*each)]
        if self._next is None and self._adaptation.observe(lengths):
            plan = self._adaptation.revised(unfinished(engine.scheduler))
            self._next = None if plan is None else (now_s + self._search_s, plan)
        elif self._next is not None:
            self._adaptation.observe(lengths)
            if self._next[0] <= now_s:
                engine.adopt(self._next[1].iteration())
                self.adopted.append((now_s, self._next[1]))
                self._next = None
