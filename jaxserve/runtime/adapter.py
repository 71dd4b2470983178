"""The thread that keeps a runtime's schedule in step with the lengths of its answers."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import final

from jaxserve.core.errors import InvalidConfigError, JaxserveError, RegroupError
from jaxserve.planning.schedules.adaptation import Adaptation
from jaxserve.planning.schedules.configuration import Division
from jaxserve.planning.schedules.observed import AnswerLength, unfinished
from jaxserve.planning.schedules.plan import Plan
from jaxserve.runtime.regrouper import Regrouper
from jaxserve.runtime.replicas import Replicas

_log = logging.getLogger(__name__)


@final
class Adapter:
    """A thread that searches for schedules beside the engines, and has all replicas adopt them.

    A search takes tenths of a second of this thread. The engines serve on meanwhile, and adopt a
    schedule between two steps. The thread starts with the first adaptation.

    Args:
      regrouper: moves devices between two groups, as a plan needs; None with one group.

    Attributes:
      num_adopted: plans that were adopted, those of `adopt` included.
    """

    def __init__(self, replicas: Replicas, regrouper: Regrouper | None = None):
        self.num_adopted = 0
        self._replicas = replicas
        self._regrouper = regrouper
        self._ended: queue.SimpleQueue[Sequence[AnswerLength] | None] = queue.SimpleQueue()
        # Held while a plan is adopted or devices move, so that replicas never have different plans.
        self._lock = threading.Lock()
        self._in_force: Plan | None = None
        self._adaptation: Adaptation | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def in_force(self) -> Plan | None:
        """The plan that the replicas carry out; None before there is one.

        Its figures are those expected with the newest lengths, if it is adapted.
        """
        return self._in_force

    def put(self, lengths: Sequence[AnswerLength]) -> None:
        """Take in ended answers, without blocking; any thread may call it."""
        if self._adaptation is not None and not self._is_closed and lengths:
            self._ended.put(lengths)

    def running(self) -> list[AnswerLength]:
        """Return the answers of all replicas that were admitted and go on.

        Raises:
          RuntimeClosedError, EngineFailedError
        """
        found: list[AnswerLength] = []
        for replica in self._replicas.all:
            found += replica.loop.ask(partial(unfinished, replica.engine.scheduler))
        return found

    def adopt(self, plan: Plan | None, adaptation: Adaptation | None) -> Plan | None:
        """Have the replicas carry out a plan, and follow the lengths from now on.

        Args:
          plan: None to go on as before until the adaptation finds one.
          adaptation: None to leave the plan as it is.

        Returns:
          The plan, with the pause that a move of devices took.

        Raises:
          RegroupError: devices could not be moved, or were moved since the plan was made; nothing
            has changed.
          RuntimeClosedError, EngineFailedError
        """
        with self._lock:
            if plan is not None:
                plan = self._carry_out(plan)
                if adaptation is not None:
                    adaptation.keep(plan)
            self._adaptation = adaptation
            if adaptation is not None and self._thread is None and not self._is_closed:
                thread = threading.Thread(target=self._run, name="jaxserve-adapter", daemon=True)
                thread.start()
                self._thread = thread
        return plan

    def regroup(self, division: Division, max_pause_s: float) -> float:
        """Move devices between the groups, and drop the plan, which was for others.

        If it was adapted, the next answers make one for these groups, which then stay.

        Returns the seconds for which the engine was paused.

        Raises:
          RegroupError: they could not be moved; the plan stays.
          RuntimeClosedError, EngineFailedError
        """
        assert self._regrouper is not None
        with self._lock:
            pause_s = self._regrouper.move(division, max_pause_s)
            self._in_force = None
            adaptation = self._adaptation
            if adaptation is not None and not self._is_closed:
                # Another one, so that a search that goes on meanwhile has no consequence.
                self._adaptation = adaptation.on_other_groups()
        return pause_s

    def close(self) -> None:
        """Stop the thread; return when it has ended. Any thread may call it.

        On an engine's thread, or on its own, it does not wait. The thread then ends when the
        replicas are closed, which ends its open question.
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

    def _carry_out(self, plan: Plan) -> Plan:
        """Have the replicas carry out a plan; return it with the pause that a move took."""
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
            # Another plan may have been asked for during the search.
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
