"""The share of one process in the work of two device groups that belong to different processes.

Every process gets every plan, in one order, and carries out those of the group whose devices it
owns. The leader knows of the others' plans from what a process of the other group reports. KV goes
from group to group through host memory and the leader: it alone decides when pages have arrived,
and which of them are still wanted.
"""

from __future__ import annotations

import abc
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import numpy as np

from jaxserve.execution.compilations import CompilationCounter
from jaxserve.execution.device import DeviceExecutor
from jaxserve.execution.handle import DeviceHandle
from jaxserve.execution.page_port import PagePort, PagesOnHost, TakenPages
from jaxserve.execution.protocol import StepHandle
from jaxserve.scheduling.plan import StepPlan, StepResult, nothing_computed
from sharding import ProcessGroup

_log = logging.getLogger(__name__)

# The processes of the encode group, and those of the decode group; no process is in both.
Processes = tuple[tuple[int, ...], tuple[int, ...]]


@final
@dataclass(frozen=True)
class Arrived:
    """A message of the leader: write these pages before the next plan."""

    pages: tuple[PagesOnHost, ...]


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
      content: the result of a step; or the pages that the plan hands over, or a str, the reason for
        which they are lost.
    """

    number: int
    content: StepResult | tuple[PagesOnHost, ...] | str


class GroupShare(abc.ABC):
    """This process's share in the work of two device groups.

    Args:
      executor: of the devices of this process's device group.
      processes: of the encode group, and of the decode group.
      strict: raise on any compilation of a copy after the warm-up.
    """

    def __init__(
        self, executor: DeviceExecutor, group: ProcessGroup, processes: Processes, *, strict: bool
    ):
        self._executor = executor
        self._group = group
        self._own_index = 0 if group.process_id in processes[0] else 1
        self._compilations = CompilationCounter(strict=strict)
        self._port = PagePort(executor.pages)
        self._num_plans = 0

    def warmup_steps(self) -> list[tuple[str, Callable[[], None]]]:
        """Return what is to be warmed up in addition to the executor's own steps."""
        return [("handover", self._port.warm_up)]

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

    def _take(self, plan: StepPlan) -> list[TakenPages]:
        """Start to copy the pages that a plan hands over from this process's group, each once."""
        pages = dict.fromkeys(page for each in plan.handovers for page in each.pages)
        with self._compilations.watch(plan):
            return self._port.take(list(pages))


@final
class LeadersShare(GroupShare):
    """The leader's share: the plans of its own group, and what others report of theirs."""

    def __init__(
        self, executor: DeviceExecutor, group: ProcessGroup, processes: Processes, *, strict: bool
    ):
        super().__init__(executor, group, processes, strict=strict)
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
        target = _target(plan)
        pages = (
            _FarHandle(self._reports, number)
            if target == self._own_index
            else _OwnPages(self._take(plan))
        )
        handle = _HandoverHandle(plan, target, pages, self._receive)
        self._pending.append(handle)
        return handle

    def _receive(self, handle: _HandoverHandle, pages: Sequence[PagesOnHost]) -> None:
        """Have pages written to the target's cache, for all of the target's later steps."""
        self._pending.remove(handle)
        if not pages:
            return
        wanted = tuple(each.without(handle.dropped) for each in pages)
        self._group.send(Arrived(wanted), self._followers[handle.target])
        if handle.target == self._own_index:
            with self._compilations.watch(handle.plan):
                for each in wanted:
                    self._port.put(each)


@final
class FollowersShare(GroupShare):
    """A follower's share: the plans of its own group, whose results one of its processes reports.

    A thread waits for results, and for pages, in the order of the plans.
    """

    def __init__(
        self, executor: DeviceExecutor, group: ProcessGroup, processes: Processes, *, strict: bool
    ):
        super().__init__(executor, group, processes, strict=strict)
        # The leader, which is the first process of its group, reads that group's results itself.
        self._reports = group.process_id == processes[self._own_index][0]
        self._waits: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # A daemon, since it may wait for a process that has died when this one ends.
        threading.Thread(target=self._read_all, name="jaxserve-reports", daemon=True).start()

    def carry_out(self, order: Any) -> None:
        """Do this process's part of a plan, or write pages that have arrived.

        Raises:
          BaseException: an earlier step has failed.
        """
        if isinstance(order, StepFailed):
            raise order.error
        if isinstance(order, Arrived):
            for each in order.pages:
                self._port.put(each)
            return
        plan: StepPlan = order
        number = self._number()
        if plan.handovers:
            if _target(plan) != self._own_index:
                self._read(number, partial(_read, self._take(plan)))
        elif plan.group == self._own_index:
            self._read(number, self._executor.submit(plan).collect)

    def settle(self) -> None:
        """Wait until the results of all plans have been read."""
        has_read = threading.Event()
        self._waits.put(has_read.set)
        has_read.wait()

    def close(self) -> None:
        """See `GroupShare`."""
        self._waits.put(None)
        self._compilations.close()

    def _read(self, number: int, content: Callable[[], Any]) -> None:
        """Have the thread wait for something, and report it."""

        def read() -> None:
            try:
                found = content()
                if self._reports:
                    self._group.report(Report(number, found))
            except BaseException as error:  # `carry_out` raises it
                self._group.remind(StepFailed(error))

        self._waits.put(read)

    def _read_all(self) -> None:
        while (wait := self._waits.get()) is not None:
            wait()


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
class _OwnPages:
    """Pages that this process has taken from its own group, as `_FarHandle` has the others'."""

    def __init__(self, taken: Sequence[TakenPages]):
        self._taken = taken

    def is_ready(self) -> bool:
        return all(each.is_ready() for each in self._taken)

    def collect(self) -> tuple[PagesOnHost, ...] | str:
        return _read(self._taken)


@final
class _HandoverHandle:
    """Pages that go from one group to the other.

    `collect` sends them on when they are in this process's memory. Where they are lost, it leaves
    the target's cache as it is, and reports the loss.

    Attributes:
      target: the group that gets them.
      dropped: pages that are not to be written any more.

    Args:
      receive: called once, with the pages; with none where they are lost.
    """

    def __init__(
        self,
        plan: StepPlan,
        target: int,
        pages: _FarHandle | _OwnPages,
        receive: Callable[[_HandoverHandle, Sequence[PagesOnHost]], None],
    ):
        self.plan = plan
        self.target = target
        self.dropped: set[int] = set()
        self._pages = pages
        self._receive = receive

    def is_ready(self) -> bool:
        """See `StepHandle`."""
        return self._pages.is_ready()

    def collect(self) -> StepResult:
        """See `StepHandle`."""
        pages = self._pages.collect()
        if isinstance(pages, str):
            num_lost = len(self.plan.handovers)
            _log.warning("the KV of %d sequences was lost: %s", num_lost, pages)
            self._receive(self, ())
            return nothing_computed(np.zeros(num_lost, np.bool_))
        self._receive(self, pages)
        return nothing_computed()


def _target(plan: StepPlan) -> int:
    """Return the group that gets the pages of a plan."""
    targets = {each.target for each in plan.handovers}
    if len(targets) > 1:
        raise NotImplementedError(
            "a plan that hands KV over in both directions, between groups in several processes"
        )
    return targets.pop()


def _read(taken: Sequence[TakenPages]) -> tuple[PagesOnHost, ...] | str:
    """Wait for pages; return them, or the reason for which they are lost."""
    try:
        return tuple(each.read() for each in taken)
    except jax.errors.JaxRuntimeError as error:
        return str(error)
