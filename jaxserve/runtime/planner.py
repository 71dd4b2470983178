"""Plans under latency bounds, and the controller that carries them out and adapts them."""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, final

import numpy as np

from jaxserve.core.errors import (
    InfeasibleBoundError,
    InvalidConfigError,
    JaxserveError,
    RegroupError,
)
from jaxserve.core.request import Completion, Request
from jaxserve.planning.schedules.lengths import lengths_of, pairs_of
from jaxserve.planning.schedules.observed import (
    AnswerLength,
    answer_lengths,
    classes_of,
    unfinished,
)
from jaxserve.planning.schedules.plan import SchedulePlan
from jaxserve.planning.schedules.schedule import (
    AllocationPolicy,
    Division,
    LatencyBounds,
    check_families,
)
from jaxserve.runtime.replicas import Replicas
from jaxserve.runtime.timings import Timings

# Searches for schedules are imported by the methods that plan: most runtimes never do.
if TYPE_CHECKING:
    from jaxserve.planning.schedules.adaptation import Adaptation
    from jaxserve.planning.schedules.planner import SchedulePlanner
    from jaxserve.planning.schedules.played import Player
    from jaxserve.runtime.regrouper import Regrouper

_log = logging.getLogger(__name__)

# Newest answers whose lengths are kept.
_MAX_OBSERVED = 100_000
# Default of the seconds for which a move of devices may pause the engine.
MAX_PAUSE_S = 1.0
# Families of schedules of two device groups: with every division of the devices, or with those that
# WAA-C and WAA-M give.
_GROUPED = ("waa", "waa_c", "waa_m")


@final
class PlanController:
    """Carries out plans on all replicas, and adapts them on a thread to the lengths of answers.

    A search takes tenths of a second of the thread, while the engines serve; they adopt a schedule
    between two steps. The thread starts with the first adaptation.
    """

    def __init__(self, replicas: Replicas, regrouper: Regrouper | None = None):
        self.num_adopted = 0
        self._replicas = replicas
        self._regrouper = regrouper
        self._ended: queue.SimpleQueue[Sequence[AnswerLength] | None] = queue.SimpleQueue()
        # Held while a plan is adopted or devices move, so that replicas never have different plans.
        self._lock = threading.Lock()
        self._in_force: SchedulePlan | None = None
        self._adaptation: Adaptation | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def in_force(self) -> SchedulePlan | None:
        """The plan that the replicas carry out; None before there is one.

        If it is adapted, its figures are those expected with the newest lengths.
        """
        return self._in_force

    def put(self, lengths: Sequence[AnswerLength]) -> None:
        """Queue ended answers for the adaptation; any thread may call it."""
        if self._adaptation is not None and not self._is_closed and lengths:
            self._ended.put(lengths)

    def running(self) -> list[AnswerLength]:
        """Return the unfinished answers that were admitted, of all replicas."""
        found: list[AnswerLength] = []
        for replica in self._replicas.all:
            found += replica.loop.ask(partial(unfinished, replica.engine.scheduler))
        return found

    def adopt(
        self, plan: SchedulePlan | None, adaptation: Adaptation | None
    ) -> SchedulePlan | None:
        """Carry out a plan, and adapt it from now on; return it with the pause of a move.

        Without a plan the present schedule stays until the adaptation finds one; without an
        adaptation the plan stays. Raises RegroupError if devices could not be moved, or were moved
        since the plan was made; then nothing has changed.
        """
        with self._lock:
            if plan is not None:
                plan = self._carry_out(plan)
                if adaptation is not None:
                    adaptation.keep(plan)
            self._adaptation = adaptation
            if adaptation is not None and self._thread is None and not self._is_closed:
                thread = threading.Thread(target=self._run, name="jaxserve-controller", daemon=True)
                thread.start()
                self._thread = thread
        return plan

    def regroup(self, division: Division, max_pause_s: float) -> float:
        """Move devices between the groups, drop the plan, and return the pause in seconds.

        If the plan was adapted, the next answers make one for the new groups, which then stay.
        After a RegroupError the plan stays.
        """
        assert self._regrouper is not None
        with self._lock:
            pause_s = self._regrouper.move(division, max_pause_s)
            self._in_force = None
            adaptation = self._adaptation
            if adaptation is not None and not self._is_closed:
                # A new object, so that the result of a search in progress is dropped.
                self._adaptation = adaptation.on_other_groups()
        return pause_s

    def close(self) -> None:
        """Stop the thread and wait for its end, except on an engine's thread or on its own.

        On these threads, it ends when the replicas are closed.
        """
        # Not under the lock: its holder may wait for the thread that calls this.
        self._is_closed = True
        self._adaptation = None
        self._ended.put(None)
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        if not any(replica.loop.is_here for replica in self._replicas.all):
            thread.join()

    def _carry_out(self, plan: SchedulePlan) -> SchedulePlan:
        """Make the replicas adopt a plan; return it with the pause of a move."""
        iteration, move, regrouper = plan.iteration(), plan.move, self._regrouper
        if regrouper is not None and plan.num_moves != regrouper.num_moves:
            raise RegroupError(
                "devices have moved between the groups while the plan was made, which is for the "
                "groups before; plan again"
            )
        if regrouper is not None and move is not None and move.is_due:
            try:
                pause_s = regrouper.move(move.division, move.max_pause_s)
            except InvalidConfigError as error:  # the page pool was resized meanwhile
                raise RegroupError(f"the plan's move is not possible any more: {error}") from error
            plan = replace(plan, move=replace(move, pause_s=pause_s))
        for replica in self._replicas.all:
            replica.loop.ask(partial(replica.engine.adopt, iteration))
        self._in_force = plan
        self.num_adopted += 1
        return plan

    # ---- on its own thread ----

    def _run(self) -> None:
        while (ended := self._ended.get()) is not None:
            adaptation = self._adaptation
            if adaptation is None:
                continue
            try:
                if adaptation.observe(ended):
                    self._revise(adaptation)
            except JaxserveError as error:  # closed, or an engine failed
                _log.info("the schedule is adapted no more: %s", error)
                self._give_up(adaptation)
            except Exception:
                _log.exception("the schedule is adapted no more; the present one stays")
                self._give_up(adaptation)

    def _give_up(self, adaptation: Adaptation) -> None:
        with self._lock:
            if self._adaptation is adaptation:
                self._adaptation = None

    def _revise(self, adaptation: Adaptation) -> None:
        before = adaptation.plan
        plan = adaptation.revised(self.running())
        with self._lock:
            # Another plan may have been requested during the search.
            if self._adaptation is not adaptation:
                return
            if plan is None:
                if self._in_force is not None:
                    self._in_force = adaptation.plan  # as expected with the newest lengths
                return
            try:
                adaptation.keep(self._carry_out(plan))
            except RegroupError as error:
                _log.warning("the plan stays: %s", error)
                adaptation.refuse(before)
            else:
                _log.info("adopted %s", plan.summary())


@final
class ObservedLengths:
    """A thread-safe log of the lengths of whole answers, each sample of a request counted.

    Cancelled and failed answers do not count.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: deque[AnswerLength] = deque(maxlen=_MAX_OBSERVED)
        self._listener: Callable[[Sequence[AnswerLength]], None] | None = None

    def append(self, request: Request, completion: Completion, /) -> None:
        lengths = answer_lengths(request, completion)
        with self._lock:
            self._newest.extend(lengths)
        if self._listener is not None:
            self._listener(lengths)

    def newest(self) -> tuple[AnswerLength, ...]:
        """Return the lengths of the newest answers, in the order of their ends."""
        with self._lock:
            return tuple(self._newest)

    def tell(self, listener: Callable[[Sequence[AnswerLength]], None]) -> None:
        """Call `listener` with the lengths of later answers, on the engine's thread."""
        self._listener = listener


@final
class Planner:
    """Finds schedules for the replicas of a runtime, which a `PlanController` carries out."""

    def __init__(
        self,
        replicas: Replicas,
        timings: Timings,
        observed: ObservedLengths,
        regrouper: Regrouper | None = None,
    ):
        self.timings = timings
        self._replicas = replicas
        self._observed = observed
        self._regrouper = regrouper
        self._controller = PlanController(replicas, regrouper)
        # Keeps its simulations from plan to plan.
        self._player: Player | None = None
        observed.tell(self._controller.put)

    @property
    def in_force(self) -> SchedulePlan | None:
        return self._controller.in_force

    @property
    def num_adopted(self) -> int:
        return self._controller.num_adopted

    @property
    def num_moves(self) -> int:
        return 0 if self._regrouper is None else self._regrouper.num_moves

    @property
    def move_pause_s(self) -> float:
        """Seconds for which moves have paused the engine."""
        return 0.0 if self._regrouper is None else self._regrouper.pause_s

    def start(self, bounds: LatencyBounds) -> None:
        """Plan as soon as lengths are known, under bounds of the options; measure step times."""
        from jaxserve.planning.schedules.adaptation import Adaptation

        # One round is the shortest measurement that has every shape.
        if self.timings.has_groups:
            self.timings.group_times(rounds=1)
        else:
            self.timings.step_times(rounds=1)
        planner = self._planner(None, max_pause_s=MAX_PAUSE_S)
        adaptation = Adaptation(planner, bounds, heeds_bounds=self._heeds_bounds)
        self._controller.adopt(None, adaptation)

    def plan(
        self,
        bounds: LatencyBounds,
        lengths: Sequence[tuple[int, int]] | np.ndarray | None,
        *,
        adopt: bool,
        adapt: bool,
        max_wait_s: float,
        max_pause_s: float,
        policies: Sequence[str] | None,
    ) -> SchedulePlan:
        from jaxserve.planning.schedules.adaptation import task_of

        self._replicas.check_leads()
        self._replicas.check_may_wait()
        given = None
        if lengths is not None:
            lengths = pairs_of(lengths)
            given = lengths_of(lengths)
            given.check_fits(self._replicas.first.engine.scheduler.config)
        elif not self._observed.newest():
            raise InvalidConfigError(
                "no answer has ended in this runtime, so no lengths are known; pass lengths=[("
                "prompt tokens, output tokens), ...], or plan after some requests"
            )
        planner = self._planner(policies, max_wait_s, max_pause_s)
        # Answers, mostly long ones, may have ended while step times were measured.
        used = self._observed.newest() if lengths is None else _answers(lengths)
        task = task_of(used) if given is None else given
        has_classes = self._heeds_bounds and any(a.bounds != LatencyBounds() for a in used)
        classes = classes_of(used, planner.max_slots) if has_classes else ()
        while True:
            try:
                plan = planner.plan(task, bounds, num_lengths=len(used), classes=classes)
            except InfeasibleBoundError:
                possible = planner.possible(task, bounds, classes)
                if len(possible) == len(classes):
                    raise
                classes = possible
                continue
            if not adopt:
                return plan
            is_given = lengths is not None
            try:
                return self._adopted(planner, plan, used, adapt=adapt, is_given=is_given)
            except RegroupError as error:
                # The next plan excludes this division, or is for the present one.
                _log.warning("planning again: %s", error)

    def regroup(self, encode: int, decode: int, max_pause_s: float) -> float:
        self._replicas.check_leads()
        self._replicas.check_may_wait()
        if self._regrouper is None:
            raise InvalidConfigError(
                "devices cannot move between groups here; create the runtime with "
                "mesh=sharding.make_groups(...) on devices of one process, without stages, and a "
                "model without an encoder"
            )
        return self._controller.regroup(Division(encode, decode), max_pause_s)

    def close(self) -> None:
        """Stop adapting, and end a move that is being prepared."""
        if self._regrouper is not None:
            self._regrouper.close()
        self._controller.close()

    def _adopted(
        self,
        planner: SchedulePlanner,
        plan: SchedulePlan,
        used: Sequence[AnswerLength],
        *,
        adapt: bool,
        is_given: bool,
    ) -> SchedulePlan:
        """Make the replicas adopt a plan, and adapt it; return it with the pause of a move."""
        from jaxserve.planning.schedules.adaptation import Adaptation

        if not adapt:
            return self._controller.adopt(plan, None) or plan
        running = self._controller.running()
        begins_s = -math.inf
        if is_given:
            # Answers that run now say nothing about lengths that the caller gave.
            known = (*self._observed.newest(), *running)
            begins_s = max((answer.admitted_s for answer in known), default=-math.inf)
            running = []
        adaptation = Adaptation(
            planner,
            plan.bounds,
            plan=plan,
            answers=[*used, *running],
            begins_s=begins_s,
            heeds_bounds=self._heeds_bounds,
        )
        return self._controller.adopt(plan, adaptation) or plan

    @property
    def _heeds_bounds(self) -> bool:
        return self._replicas.first.engine.scheduler.policy.order.heeds_bounds

    def _planner(
        self,
        policies: Sequence[str] | None,
        max_wait_s: float | None = None,
        max_pause_s: float = 0.0,
    ) -> SchedulePlanner:
        from jaxserve.planning.schedules.families import FAMILIES, planner_of
        from jaxserve.planning.schedules.played import Player

        policy = self._replicas.first.engine.scheduler.policy
        if self.timings.has_groups:
            own = [family for family in policy.families if family in _GROUPED]
            families = policies if policies is not None else own or ("waa",)
            check_families(families, _GROUPED)
            return self._grouped(families, policies, max_wait_s, max_pause_s)
        own = [family for family in policy.families if family in FAMILIES]
        families = policies if policies is not None else own or FAMILIES
        check_families(families, FAMILIES)
        times = self.timings.step_times(max_wait_s)
        player = self._player
        if player is None or player.times is not times:
            # The scheduler's configuration, unlike the executor's, keeps the pool's pages in sleep.
            scheduler = self._replicas.first.engine.scheduler
            player = self._player = Player(times, policy, lambda: scheduler.config)
        return planner_of(player, families)

    def _grouped(
        self,
        families: Sequence[str],
        policies: Sequence[str] | None,
        max_wait_s: float | None,
        max_pause_s: float,
    ) -> SchedulePlanner:
        from jaxserve.planning.schedules.divided import DividedPlanner
        from jaxserve.planning.schedules.measured_waa import WAAPlanner

        executor, regrouper = self._replicas.first.executor, self._regrouper
        if regrouper is None and policies is not None and "waa" not in policies:
            raise InvalidConfigError(
                f"policies={policies!r} divides the devices by a rule, and here they cannot move "
                "between the groups; pass policies=('waa',), or None"
            )
        rules = () if "waa" in families else tuple(map(AllocationPolicy, sorted(families)))
        times = self.timings.group_times(max_wait_s)
        # The page pool may be resized later.
        if regrouper is None:
            policy = rules[0] if rules else AllocationPolicy.WAA_C
            return WAAPlanner(times=times, config=lambda: executor.config, policy=policy)
        regrouper.learn(times)
        return DividedPlanner(
            options=regrouper.options,
            config=lambda: executor.config,
            num_moves=lambda: regrouper.num_moves,
            max_pause_s=max_pause_s,
            rules=tuple(map(regrouper.rule, rules)),
        )


def _answers(pairs: np.ndarray) -> tuple[AnswerLength, ...]:
    return tuple(
        AnswerLength(admitted_s=-math.inf, num_prompt=prompt, num_output=output)
        for prompt, output in pairs.tolist()
    )
