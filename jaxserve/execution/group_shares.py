"""The share of one process in the work of two device groups that belong to different processes.

Every process gets every plan, in one order, and carries out those of the group whose devices it
owns. The leader knows of the others' plans from what a process of the other group reports. KV goes
from group to group as a `Courier` has it; the leader alone decides when pages have arrived, and
which of them are still wanted.
"""

from __future__ import annotations

import abc
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from jaxserve.execution.compilations import CompilationCounter
from jaxserve.execution.couriers import Arrived, Awaited, Courier, Outcome, Processes
from jaxserve.execution.device import DeviceExecutor
from jaxserve.execution.handle import DeviceHandle
from jaxserve.execution.protocol import StepHandle
from jaxserve.scheduling.plan import StepPlan, StepResult, nothing_computed
from sharding import ProcessGroup

_log = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class StepFailed:
    """What a follower's own thread tells it: a step has failed, or could not be reported."""

    error: BaseException


@final
@dataclass(frozen=True)
class Report:
    """A follower's message: what came of a plan.

    Attributes:
      number: of plans before it.
      content: the result of a step, or the outcome of a handover.
    """

    number: int
    content: StepResult | Outcome


class GroupShare(abc.ABC):
    """This process's share in the work of two device groups.

    Args:
      executor: of the devices of this process's device group.
      processes: of the encode group, and of the decode group.
      courier: this process's part in handovers.
      strict: raise on any compilation of a copy after the warm-up.
    """

    def __init__(
        self,
        executor: DeviceExecutor,
        group: ProcessGroup,
        processes: Processes,
        courier: Courier,
        *,
        strict: bool,
    ):
        self._executor = executor
        self._group = group
        self._own_index = 0 if group.process_id in processes[0] else 1
        self._compilations = CompilationCounter(strict=strict)
        self._courier = courier
        self._num_plans = 0

    def warmup_steps(self) -> list[tuple[str, Callable[[], None]]]:
        """Return what is to be warmed up in addition to the executor's own steps."""
        return [("handover", self._courier.warm_up)]

    def finish_warmup(self) -> None:
        """Treat every later compilation as a stall, and in strict mode as an error."""
        self._compilations.expect_none()

    @property
    def num_compilations(self) -> int:
        """Compilations of copies."""
        return self._compilations.count

    @abc.abstractmethod
    def close(self) -> None:
        """End what the share has begun; the executor is closed by its owner."""

    def _number(self) -> int:
        """Return the number of plans before this one, which is the same in every process."""
        self._num_plans += 1
        return self._num_plans - 1

    def _begin(self, plan: StepPlan, number: int) -> Awaited | None:
        with self._compilations.watch(plan):
            return self._courier.begin(plan, number)


@final
class LeadersShare(GroupShare):
    """The leader's share: the plans of its own group, and what others report of theirs."""

    def __init__(
        self,
        executor: DeviceExecutor,
        group: ProcessGroup,
        processes: Processes,
        courier: Courier,
        *,
        strict: bool,
    ):
        super().__init__(executor, group, processes, courier, strict=strict)
        self._followers = [[each for each in ids if each != group.process_id] for ids in processes]
        self._reports = _Reports(group, processes[1 - self._own_index][0])
        self._pending: list[_HandoverHandle] = []

    def submit(self, plan: StepPlan) -> StepHandle:
        """Carry out this process's part of a plan that every follower has, too."""
        number = self._number()
        if plan.handovers:
            return self._hand_over(plan, number)
        # These pages belong to another sequence now, which may be computed before the copies of
        # their former owner arrive.
        taken = {page for _, _, page in plan.page_updates}
        for handle in self._pending:
            if handle.target == plan.group:
                handle.dropped |= taken
        if plan.group == self._own_index:
            return self._executor.submit(plan)
        return _FarHandle(self._reports, number)

    def close(self) -> None:
        """See `GroupShare`."""
        self._pending.clear()
        self._compilations.close()

    def _hand_over(self, plan: StepPlan, number: int) -> StepHandle:
        target = plan.handovers[0].target
        awaited = self._begin(plan, number) or _FarHandle(self._reports, number)
        handle = _HandoverHandle(plan, number, target, awaited, self._receive)
        self._pending.append(handle)
        return handle

    def _receive(self, handle: _HandoverHandle, outcome: Outcome) -> None:
        """Have pages written to the target's cache, for all of the target's later steps."""
        self._pending.remove(handle)
        arrived = Arrived(handle.number, outcome, frozenset(handle.dropped))
        self._group.send(arrived, self._followers[handle.target])
        if handle.target == self._own_index:
            with self._compilations.watch(handle.plan):
                self._courier.write(arrived)


@final
class FollowersShare(GroupShare):
    """A follower's share: the plans of its own group, whose results one of its processes reports.

    A thread waits for results in the order of the plans; another one, which does not wait for
    steps, for pages.
    """

    def __init__(
        self,
        executor: DeviceExecutor,
        group: ProcessGroup,
        processes: Processes,
        courier: Courier,
        *,
        strict: bool,
    ):
        super().__init__(executor, group, processes, courier, strict=strict)
        # The leader, which is the first process of its group, reads that group's results itself.
        self._reports = group.process_id == processes[self._own_index][0]
        self._results = _Waits("jaxserve-reports")
        self._pages = _Waits("jaxserve-pages")

    def carry_out(self, order: Any) -> None:
        """Do this process's part of a plan, or write pages that have arrived.

        Raises:
          BaseException: an earlier step has failed.
        """
        if isinstance(order, StepFailed):
            raise order.error
        if isinstance(order, Arrived):
            self._courier.write(order)
            return
        plan: StepPlan = order
        number = self._number()
        if plan.handovers:
            awaited = self._begin(plan, number)
            if awaited is not None:
                self._read(self._pages, number, awaited.collect)
        elif plan.group == self._own_index:
            self._read(self._results, number, self._executor.submit(plan).collect)

    def settle(self) -> None:
        """Wait until the results of all plans have been read."""
        for waits in (self._results, self._pages):
            waits.settle()

    def close(self) -> None:
        """See `GroupShare`."""
        for waits in (self._results, self._pages):
            waits.close()
        self._compilations.close()

    def _read(self, waits: _Waits, number: int, content: Callable[[], Any]) -> None:
        """Have a thread wait for something, and report it."""

        def read() -> None:
            try:
                found = content()
                if self._reports:
                    self._group.report(Report(number, found))
            except BaseException as error:  # `carry_out` raises it
                self._group.remind(StepFailed(error))

        waits.put(read)


@final
class _Waits:
    """A thread that makes calls in their order."""

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # A daemon, since it may wait for a process that has died when this one ends.
        threading.Thread(target=self._make_all, name=name, daemon=True).start()

    def put(self, call: Callable[[], object]) -> None:
        """Have the thread make a call after those before it."""
        self._calls.put(call)

    def settle(self) -> None:
        """Wait until all calls have been made."""
        is_done = threading.Event()
        self._calls.put(is_done.set)
        is_done.wait()

    def close(self) -> None:
        """End the thread after its calls."""
        self._calls.put(None)

    def _make_all(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


@final
class InOrder:
    """The share of a follower whose devices are all in one group: every plan.

    Args:
      executor: of this process's devices.
    """

    def __init__(self, executor: DeviceExecutor):
        self._executor = executor
        self._before: DeviceHandle | None = None

    def carry_out(self, order: Any) -> None:
        """Submit a plan, and wait for the one before it; raise if that one has failed."""
        newest = self._executor.submit(order)
        self.settle()
        self._before = newest

    def settle(self) -> None:
        """Wait for the newest plan; raise if it has failed."""
        before, self._before = self._before, None
        if before is not None:
            before.collect()


@final
class _Reports:
    """What a follower has reported to the leader, by the number of plans before it."""

    def __init__(self, group: ProcessGroup, process_id: int):
        self._group = group
        self._process_id = process_id
        self._found: dict[int, Any] = {}
        # An earlier runtime has left reports that no handle has taken.
        while self._group.next_report(process_id, waits=False) is not None:
            pass

    def has(self, number: int) -> bool:
        """Return whether the report of a plan has come."""
        while number not in self._found and self._note(waits=False):
            pass
        return number in self._found

    def take(self, number: int) -> Any:
        """Wait for the report of a plan, and return its content."""
        while number not in self._found:
            self._note(waits=True)
        return self._found.pop(number)

    def _note(self, *, waits: bool) -> bool:
        report: Report | None = self._group.next_report(self._process_id, waits=waits)
        if report is not None:
            self._found[report.number] = report.content
        return report is not None


@final
class _FarHandle:
    """A plan that processes of the other group carry out."""

    def __init__(self, reports: _Reports, number: int):
        self._reports = reports
        self._number = number

    def is_ready(self) -> bool:
        """See `StepHandle`."""
        return self._reports.has(self._number)

    def collect(self) -> Any:
        """Wait for the report; return its content."""
        return self._reports.take(self._number)


@final
class _HandoverHandle:
    """Pages that go from one group to the other.

    `collect` has them written when they have arrived. Where they are lost, it leaves the target's
    cache as it is, and reports the loss.

    Attributes:
      number: of plans before this one.
      target: the group that gets them.
      dropped: pages that are not to be written any more.

    Args:
      awaited: what the outcome comes from.
      receive: called once, with the outcome.
    """

    def __init__(
        self,
        plan: StepPlan,
        number: int,
        target: int,
        awaited: Awaited,
        receive: Callable[[_HandoverHandle, Outcome], None],
    ):
        self.plan = plan
        self.number = number
        self.target = target
        self.dropped: set[int] = set()
        self._awaited = awaited
        self._receive = receive

    def is_ready(self) -> bool:
        """See `StepHandle`."""
        return self._awaited.is_ready()

    def collect(self) -> StepResult:
        """See `StepHandle`."""
        outcome = self._awaited.collect()
        self._receive(self, outcome)
        if not isinstance(outcome, str):
            return nothing_computed()
        num_lost = len(self.plan.handovers)
        _log.warning("the KV of %d sequences was lost: %s", num_lost, outcome)
        return nothing_computed(np.zeros(num_lost, np.bool_))
