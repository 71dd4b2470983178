"""Executors of a model that several processes serve together: one leads, the others follow.

The leader schedules. It sends each plan to the followers, then carries it out itself. Each process
drives its own devices. Processes with devices of one group call the same executables in the same
order, and every device of the group has the results. Where two device groups belong to different
processes, a `GroupShare` carries out the plans of the group whose devices the process owns.
"""

from __future__ import annotations

import abc
import enum
import logging
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from jaxserve.core.errors import (
    HostMemoryError,
    InvalidConfigError,
    ProcessGroupError,
    RuntimeClosedError,
)
from jaxserve.execution.couriers import Arrived, Awaited, Courier, Outcome, Processes, make_courier
from jaxserve.execution.device import DeviceExecutor
from jaxserve.execution.executor import StepHandle
from jaxserve.execution.model_executor import CompilationCounter, ModelExecutor, SubmittedStep
from jaxserve.execution.pages import DevicePages
from jaxserve.memory.page_pool import Moves
from jaxserve.scheduling.kv.manager import SwapCosts
from jaxserve.scheduling.plan import StepPlan, StepResult, nothing_computed
from sharding import ProcessGroup

_log = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class StepFailed:
    """A message of a follower's own thread: a step failed, or its result could not be reported."""

    error: BaseException


@final
@dataclass(frozen=True)
class FollowerReport:
    """A follower's message: the result of a step or handover after `number` plans."""

    number: int
    content: StepResult | Outcome


class GroupShare(abc.ABC):
    """One process's share in the work of two device groups that belong to different processes.

    Every process gets every plan, in one order. KV passes between the groups through a `Courier`.
    The leader alone decides when pages have arrived, and which of them are still needed. In strict
    mode any compilation of a copy after the warm-up raises.
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
        """Return the warm-up steps in addition to those of the executor."""
        return [("handover", self._courier.warm_up)]

    def finish_warmup(self) -> None:
        """Treat every later compilation as a stall, and in strict mode as an error."""
        self._compilations.expect_none()

    @property
    def num_compilations(self) -> int:
        """Number of compilations of copies."""
        return self._compilations.count

    @abc.abstractmethod
    def close(self) -> None:
        """End threads and counters; the owner of the executor closes it."""

    def _number(self) -> int:
        """Count a plan; return the number of plans before it, the same in every process."""
        self._num_plans += 1
        return self._num_plans - 1

    def _begin(self, plan: StepPlan, number: int) -> Awaited | None:
        with self._compilations.watch(plan):
            return self._courier.begin(plan, number)


@final
class LeadersShare(GroupShare):
    """The leader's share: the plans of its group, and the reports on the other group's plans."""

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
        self._pending.clear()
        self._compilations.close()

    def _hand_over(self, plan: StepPlan, number: int) -> StepHandle:
        target = plan.handovers[0].target
        awaited = self._begin(plan, number) or _FarHandle(self._reports, number)
        handle = _HandoverHandle(plan, number, target, awaited, self._receive)
        self._pending.append(handle)
        return handle

    def _receive(self, handle: _HandoverHandle, outcome: Outcome) -> None:
        self._pending.remove(handle)
        arrived = Arrived(handle.number, outcome, frozenset(handle.dropped))
        self._group.send(arrived, self._followers[handle.target])
        if handle.target == self._own_index:
            with self._compilations.watch(handle.plan):
                self._courier.write(arrived)


@final
class FollowersShare(GroupShare):
    """A follower's share: the plans of its own group, whose results one of its processes reports.

    One thread waits for results in the order of the plans, and a second one for pages.
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

    def carry_out(self, message: Any) -> None:
        """Carry out this process's part of a plan, or write pages; raise if a step has failed."""
        if isinstance(message, StepFailed):
            raise message.error
        if isinstance(message, Arrived):
            self._courier.write(message)
            return
        plan: StepPlan = message
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
        for waits in (self._results, self._pages):
            waits.close()
        self._compilations.close()

    def _read(self, waits: _Waits, number: int, content: Callable[[], Any]) -> None:
        def read() -> None:
            try:
                found = content()
                if self._reports:
                    self._group.report(FollowerReport(number, found))
            except BaseException as error:  # `carry_out` raises it
                self._group.remind(StepFailed(error))

        waits.put(read)


@final
class _Waits:
    """A thread that makes calls in order."""

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # A daemon, since it may wait for a process that has died when this one ends.
        threading.Thread(target=self._make_all, name=name, daemon=True).start()

    def put(self, call: Callable[[], object]) -> None:
        self._calls.put(call)

    def settle(self) -> None:
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
    """The share of a follower whose devices are all in one group: every plan."""

    def __init__(self, executor: DeviceExecutor):
        self._executor = executor
        self._before: SubmittedStep | None = None

    def carry_out(self, message: Any) -> None:
        """Submit a plan, and wait for the previous one; raise if that one has failed."""
        newest = self._executor.submit(message)
        self.settle()
        self._before = newest

    def settle(self) -> None:
        """Wait for the newest plan; raise if it has failed."""
        before, self._before = self._before, None
        if before is not None:
            before.collect()


@final
class _Reports:
    """The reports of a follower to the leader, by the number of plans before each."""

    def __init__(self, group: ProcessGroup, process_id: int):
        self._group = group
        self._process_id = process_id
        self._found: dict[int, Any] = {}
        # An earlier runtime has left reports that no handle has taken.
        while self._group.next_report(process_id, waits=False) is not None:
            pass

    def has(self, number: int) -> bool:
        while number not in self._found and self._note(waits=False):
            pass
        return number in self._found

    def take(self, number: int) -> Any:
        while number not in self._found:
            self._note(waits=True)
        return self._found.pop(number)

    def _note(self, *, waits: bool) -> bool:
        report: FollowerReport | None = self._group.next_report(self._process_id, waits=waits)
        if report is not None:
            self._found[report.number] = report.content
        return report is not None


@final
class _FarHandle:
    """A step of the other group, whose result a follower reports."""

    def __init__(self, reports: _Reports, number: int):
        self._reports = reports
        self._number = number

    def is_ready(self) -> bool:
        return self._reports.has(self._number)

    def collect(self) -> Any:
        return self._reports.take(self._number)


@final
class _HandoverHandle:
    """Pages in transit from one group to the other, after `number` plans.

    `collect` calls `receive` once, with the outcome: pages that have arrived are written. If they
    are lost, it leaves the target's cache unchanged and reports the loss. Pages in `dropped` must
    not be written, because another sequence owns them.
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
        return self._awaited.is_ready()

    def collect(self) -> StepResult:
        outcome = self._awaited.collect()
        self._receive(self, outcome)
        if not isinstance(outcome, str):
            return nothing_computed()
        num_lost = len(self.plan.handovers)
        _log.warning("the KV of %d sequences was lost: %s", num_lost, outcome)
        return nothing_computed(np.zeros(num_lost, np.bool_))


@final
class Command(enum.Enum):
    """A command of the leader: return from `follow`, or close."""

    DISMISS = enum.auto()
    CLOSE = enum.auto()


@final
@dataclass(frozen=True)
class ParamsUpdated:
    """A message: the leader replaced the parameters `count` times; a follower must do the same."""

    count: int


class GroupExecutor(ModelExecutor):
    """This process's executor in a group, and its `GroupRole`; it owns `executor`.

    The processes compile in the same order, and do not resize, since they would have to agree on
    the size. Each can read only its own part of a host page, so there is no `host_memory`.
    """

    can_resize = False

    def __init__(
        self, executor: DeviceExecutor, group: ProcessGroup, share: GroupShare | None = None
    ):
        self.config, self.refinement = executor.config, executor.refinement
        self.group = self
        self.num_device_groups = 1 if share is None else 2
        self._executor = executor
        self._group = group
        self._group_share = share
        self._num_updates = 0

    @property
    def swap_costs(self) -> SwapCosts | None:
        """The costs of this process; all measure together, and the leader plans with its own."""
        return self._executor.swap_costs

    @property
    def num_compilations(self) -> int:
        share = self._group_share
        return self._executor.num_compilations + (0 if share is None else share.num_compilations)

    @property
    def is_warm(self) -> bool:
        return self._executor.is_warm

    @property
    def num_buffers(self) -> int:
        return self._executor.num_buffers

    @property
    def device(self) -> Any:
        return self._executor.device

    def warmup_steps(self) -> list[tuple[str, Callable[[], None]]]:
        """Return functions that all processes call, in this order."""
        more = [] if self._group_share is None else self._group_share.warmup_steps()
        return [*self._executor.warmup_steps(), *more]

    def reset(self) -> bool:
        """Return False: a step may have failed on one process only."""
        return False

    def finish_warmup(self) -> None:
        self._executor.finish_warmup()
        if self._group_share is not None:
            self._group_share.finish_warmup()

    def encode(self, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        raise ProcessGroupError(
            f"{self._group.num_processes} processes serve the model, and encoder outputs are read "
            "on one alone; encode on a runtime whose mesh is within this process"
        )

    def fitted(self, params: Any, *, partial: bool = False) -> Any:
        return self._executor.fitted(params, partial=partial)

    @property
    def params(self) -> Any:
        return self._executor.params

    def drop_params(self) -> None:
        self._executor.drop_params()

    def resize(self, num_pages: int, moves: Moves) -> None:
        raise InvalidConfigError(
            f"the page pool cannot be resized to {num_pages} pages: "
            f"{self._group.num_processes} processes share it; close the runtime on all of them "
            "and create one with another kv_memory"
        )

    @property
    @abc.abstractmethod
    def is_leader(self) -> bool: ...

    @abc.abstractmethod
    def check_leads(self) -> None: ...

    @abc.abstractmethod
    def follow(self) -> None: ...

    @abc.abstractmethod
    def dismiss(self) -> None: ...

    def _close_own(self) -> None:
        if self._group_share is not None:
            self._group_share.close()
        self._executor.close()
        self._group.release()


@final
class LeadingExecutor(GroupExecutor):
    """The executor of the process that schedules."""

    def __init__(
        self, executor: DeviceExecutor, group: ProcessGroup, share: LeadersShare | None = None
    ):
        super().__init__(executor, group, share)
        self._carrier = share or executor

    @property
    def is_leader(self) -> bool:
        return True

    def check_leads(self) -> None:
        pass

    def follow(self) -> None:
        raise ProcessGroupError(
            f"this is process {self._group.process_id} of {self._group.num_processes}, which leads "
            "and cannot follow; call follow() on the processes where rt.is_leader is false"
        )

    def dismiss(self) -> None:
        self._group.broadcast(Command.DISMISS)

    def submit(self, plan: StepPlan) -> StepHandle:
        self._group.broadcast(plan)
        return self._carrier.submit(plan)

    def update_params(self, params: Any) -> None:
        """Replace the parameters; every follower must do the same before the next plan."""
        self._executor.update_params(params)
        self._num_updates += 1
        self._group.broadcast(ParamsUpdated(self._num_updates))

    def close(self) -> None:
        """Close the executors of all processes."""
        self._group.let_go()  # a follower may have ended before this process has closed its own
        self._group.broadcast(Command.CLOSE)
        self._close_own()


@final
class FollowingExecutor(GroupExecutor):
    """The executor of a process that carries out only the leader's plans.

    A failure ends all processes, because no process can continue without this one's devices.
    """

    def __init__(
        self, executor: DeviceExecutor, group: ProcessGroup, share: FollowersShare | None = None
    ):
        super().__init__(executor, group, share)
        self._carrier = share or InOrder(executor)
        self._is_over = False

    @property
    def is_leader(self) -> bool:
        return False

    def check_leads(self) -> None:
        raise self._refusal()

    def follow(self) -> None:
        if self._is_over:
            raise RuntimeClosedError("the leader closed this runtime; create a new one on all")
        with self._group.reporting_failure(), _without_interrupts():
            self._is_over = self._carry_out() is Command.CLOSE

    def dismiss(self) -> None:
        raise self._refusal()

    def submit(self, plan: StepPlan) -> StepHandle:
        """Raise ProcessGroupError: plans come from the leader."""
        raise self._refusal()

    def update_params(self, params: Any) -> None:
        """Replace the parameters, between two calls of `follow`, once per leader's update."""
        self._executor.update_params(params)
        self._num_updates += 1

    def close(self) -> None:
        """Free all device memory. If the leader has not closed yet, the group fails."""
        if not self._is_over:
            self._is_over = True
            self._group.fail("it closed its runtime before the leader did; call rt.follow() first")
        self._close_own()

    def _refusal(self) -> ProcessGroupError:
        return ProcessGroupError(
            f"this is process {self._group.process_id} of {self._group.num_processes}, which only "
            "follows; use the Runtime of process 0 (rt.is_leader), and call rt.follow() here"
        )

    def _carry_out(self) -> Command:
        while not isinstance(message := self._group.receive(), Command):
            if isinstance(message, ParamsUpdated):
                self._check_updates(message.count)
            else:
                self._carrier.carry_out(message)
        self._carrier.settle()
        return message

    def _check_updates(self, count: int) -> None:
        if self._num_updates != count:
            raise ProcessGroupError(
                f"the leader has updated the parameters {count} times and this process "
                f"{self._num_updates} times; call rt.dismiss_followers() on the leader, then "
                "rt.update_params on all processes"
            )


def in_group(
    executor: DeviceExecutor,
    group: ProcessGroup,
    processes: Processes | None = None,
    *,
    strict: bool = False,
    couriers: Callable[..., Courier] = make_courier,
) -> GroupExecutor:
    """Return a `LeadingExecutor` in process 0, and a `FollowingExecutor` in every other process.

    `processes` are those of the encode group and of the decode group, None for one group. If
    `strict`, compiling a copy between groups after the warm-up raises.
    """
    share: Any = None
    if processes is not None:
        courier = couriers(executor, group, processes)
        kind = LeadersShare if group.is_leader else FollowersShare
        share = kind(executor, group, processes, courier, strict=strict)
    role = LeadingExecutor if group.is_leader else FollowingExecutor
    return role(executor, group, share)


def allocate_host_pages(pages: DevicePages, group: ProcessGroup) -> None:
    """Allocate the memory of the host pages of every process. Every process must call it.

    A process without enough memory then fails at the start, not in a step: every process raises
    HostMemoryError.
    """
    failure = None
    try:
        pages.allocate_host()
    except HostMemoryError as error:
        failure = str(error)
    for process_id, each in enumerate(group.all_gather(failure)):
        if each is not None:
            raise HostMemoryError(f"process {process_id} of {group.num_processes}: {each}")


def check_alike(group: ProcessGroup, settings: dict[str, Any]) -> None:
    """Raise InvalidConfigError on every process if `settings` differ; every process calls it."""
    everyones = group.all_gather(settings)
    for process_id, theirs in enumerate(everyones):
        for name, value in everyones[0].items():
            if theirs[name] != value:
                raise InvalidConfigError(
                    f"{name} is {value!r} on process 0 and {theirs[name]!r} on process "
                    f"{process_id}; pass the same model and options on all processes"
                )


@contextmanager
def _without_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
