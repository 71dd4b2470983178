"""Executors of a model that several processes serve together: one leads, the others follow.

The leader schedules. It sends each plan to the followers, then carries it out itself. Each process
drives its own devices. Processes with devices of one group call the same executables in the same
order, and every device of the group has the results. Where two device groups belong to different
processes, every process gets every plan, in one order, and carries out those of its own group. KV
passes between the groups through a `KVTransport`.
"""

from __future__ import annotations

import enum
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np

from jaxserve.core.errors import (
    HostMemoryError,
    InvalidConfigError,
    ProcessGroupError,
    RuntimeClosedError,
)
from jaxserve.execution.device import DeviceExecutor
from jaxserve.execution.executor import ProcessRole, StepHandle
from jaxserve.execution.model_executor import ModelExecutor
from jaxserve.execution.pages import DevicePages
from jaxserve.execution.stages import DeviceStage
from jaxserve.execution.transport import (
    Arrived,
    Awaited,
    KVTransport,
    Outcome,
    Processes,
    make_transport,
)
from jaxserve.memory.page_pool import Moves
from jaxserve.scheduling.kv.manager import SwapCosts
from jaxserve.scheduling.plan import StepPlan, StepResult
from jaxserve.sharding import ProcessGroup

# ---- messages, in addition to plans and `Arrived` ----


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


# ---- executors ----


class ProcessExecutor(ModelExecutor, ProcessRole):
    """This process's executor among several, and its `ProcessRole`; it owns `executor`.

    The processes compile in the same order, and do not resize, since they would have to agree on
    the size. Each can read only its own part of a host page, so there is no `host_memory`. In
    strict mode any compilation of a copy between device groups after the warm-up raises.

    Args:
      processes: those of the encode group and of the decode group; None for one device group, which
        needs no transport.
    """

    can_resize = False

    def __init__(
        self,
        executor: DeviceExecutor,
        group: ProcessGroup,
        processes: Processes | None = None,
        transport: KVTransport | None = None,
        *,
        strict: bool = False,
    ):
        super().__init__(executor.config, strict=strict)
        self.refinement = executor.refinement
        self.group = self
        self.num_device_groups = 1 if processes is None else 2
        self._executor = executor
        self._group = group
        self._processes = processes or (tuple(range(group.num_processes)),)
        self._own_index = 0 if group.process_id in self._processes[0] else 1
        self._handovers = transport
        self._reports: _Reports | None = None
        if processes is not None and group.is_leader:
            self._reports = _Reports(group, processes[1 - self._own_index][0])
        self._num_plans = 0
        self._num_updates = 0

    @property
    def swap_costs(self) -> SwapCosts | None:
        """The costs of this process; all measure together, and the leader plans with its own."""
        return self._executor.swap_costs

    @property
    def num_compilations(self) -> int:
        return self._executor.num_compilations + self._compilations.count

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
        more = [] if self._handovers is None else [("handover", self._handovers.warm_up)]
        return [*self._executor.warmup_steps(), *more]

    def reset(self) -> bool:
        """Return False: a step may have failed on one process only."""
        return False

    def finish_warmup(self) -> None:
        self._executor.finish_warmup()
        super().finish_warmup()

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

    def update_params(self, params: Any) -> None:
        self._executor.update_params(params)
        self._num_updates += 1

    def drop_params(self) -> None:
        self._executor.drop_params()

    def resize(self, num_pages: int, moves: Moves) -> None:
        raise InvalidConfigError(
            f"the page pool cannot be resized to {num_pages} pages: "
            f"{self._group.num_processes} processes share it; close the runtime on all of them "
            "and create one with another kv_memory"
        )

    @property
    def is_leader(self) -> bool:
        return self._group.is_leader

    @property
    def _transport(self) -> KVTransport:
        assert self._handovers is not None, "a handover, with one device group"
        return self._handovers

    @property
    def _name(self) -> str:
        return f"this is process {self._group.process_id} of {self._group.num_processes}"

    def _number(self) -> int:
        """Count a plan; return the number of plans before it, the same in every process."""
        self._num_plans += 1
        return self._num_plans - 1

    def _sent(self, plan: StepPlan, number: int) -> Awaited | None:
        with self._compilations.watch(plan):
            return self._transport.send(plan, number)

    def _close_own(self) -> None:
        self._compilations.close()
        self._executor.close()
        self._group.release()


@final
class LeadingExecutor(ProcessExecutor):
    """The executor of the process that schedules.

    It alone decides when pages that pass between device groups have arrived, and which of them are
    still needed.
    """

    def check_leads(self) -> None:
        pass

    def follow(self) -> None:
        raise ProcessGroupError(
            f"{self._name}, which leads and cannot follow; call follow() on the processes where "
            "rt.is_leader is false"
        )

    def dismiss(self) -> None:
        self._group.broadcast(Command.DISMISS)

    def submit(self, plan: StepPlan) -> StepHandle:
        self._group.broadcast(plan)
        with self._group.step() as step:
            handle, is_ours = self._begun(plan)
            if is_ours:
                step.submitted(handle.is_ready)
        return handle

    def _begun(self, plan: StepPlan) -> tuple[StepHandle, bool]:
        """Begin a plan; return its handle, and whether the devices of this process compute it."""
        if self._reports is None:
            return self._executor.submit(plan), True
        elsewhere = _Reported(self._reports, self._number())
        if plan.handovers:
            awaited = self._sent(plan, elsewhere.number) or elsewhere
            return self._transport.track(plan, elsewhere.number, awaited, self._receive), False
        self._transport.keep_off(plan)
        if plan.group != self._own_index:
            return elsewhere, False
        return self._executor.submit(plan), True

    def _receive(self, plan: StepPlan, arrived: Arrived) -> None:
        target = plan.handovers[0].target
        others = [each for each in self._processes[target] if each != self._group.process_id]
        self._group.send(arrived, others)
        if target == self._own_index:
            with self._compilations.watch(plan):
                self._transport.write(arrived)

    def update_params(self, params: Any) -> None:
        """Replace the parameters; every follower must do the same before the next plan."""
        super().update_params(params)
        self._group.broadcast(ParamsUpdated(self._num_updates))

    def close(self) -> None:
        """Close the executors of all processes."""
        self._group.let_go()  # a follower may have ended before this process has closed its own
        self._group.broadcast(Command.CLOSE)
        self._close_own()


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
@dataclass(frozen=True)
class _Reported:
    """A step or a handover after `number` plans, whose result a follower reports."""

    reports: _Reports
    number: int

    def is_ready(self) -> bool:
        return self.reports.has(self.number)

    def collect(self) -> Any:
        return self.reports.take(self.number)


@final
class FollowingExecutor(ProcessExecutor):
    """The executor of a process that carries out only the leader's plans.

    One thread waits for results in the order of the plans, and a second one for pages. The first
    process of a device group reports them to the leader. A failure ends all processes, because no
    process can continue without this one's devices.
    """

    _is_over = False

    def check_leads(self) -> None:
        raise self._refusal()

    def follow(self) -> None:
        if self._is_over:
            raise RuntimeClosedError("the leader closed this runtime; create a new one on all")
        with (
            self._group.reporting_failure(),
            _without_interrupts(),
            closing(_Waits("jaxserve-reports", self._group)) as results,
            closing(_Waits("jaxserve-pages", self._group)) as pages,
        ):
            while not isinstance(message := self._group.receive(), Command):
                if isinstance(message, ParamsUpdated):
                    self._check_updates(message.count)
                elif isinstance(message, StepFailed):
                    raise message.error
                elif isinstance(message, Arrived):
                    self._transport.write(message)
                else:
                    self._carry_out(message, results, pages)
            for waits in (results, pages):
                waits.settle()
            self._is_over = message is Command.CLOSE

    def dismiss(self) -> None:
        raise self._refusal()

    def submit(self, plan: StepPlan) -> StepHandle:
        """Raise ProcessGroupError: plans come from the leader."""
        raise self._refusal()

    def close(self) -> None:
        """Free all device memory. If the leader has not closed yet, the group fails."""
        if not self._is_over:
            self._is_over = True
            self._group.fail("it closed its runtime before the leader did; call rt.follow() first")
        self._close_own()

    def _refusal(self) -> ProcessGroupError:
        return ProcessGroupError(
            f"{self._name}, which only follows; use the Runtime of process 0 (rt.is_leader), and "
            "call rt.follow() here"
        )

    def _carry_out(self, plan: StepPlan, results: _Waits, pages: _Waits) -> None:
        """Carry out this process's part of a plan."""
        number = self._number()
        with self._group.step() as step:
            if plan.handovers:
                if (sent := self._sent(plan, number)) is not None:
                    pages.put(partial(self._report, number, sent))
            elif plan.group == self._own_index:
                handle = self._executor.submit(plan)
                step.submitted(handle.is_ready)
                results.put(partial(self._report, number, handle))

    def _report(self, number: int, awaited: Awaited) -> None:
        content = awaited.collect()
        if self._group.process_id == self._processes[self._own_index][0]:
            self._group.report(FollowerReport(number, content))

    def _check_updates(self, count: int) -> None:
        if self._num_updates != count:
            raise ProcessGroupError(
                f"the leader has updated the parameters {count} times and this process "
                f"{self._num_updates} times; call rt.dismiss_followers() on the leader, then "
                "rt.update_params on all processes"
            )


@final
class _Waits:
    """A thread of a follower that makes calls in order.

    A failure is the next message that the process receives, and `settle` raises it.
    """

    def __init__(self, name: str, group: ProcessGroup):
        self._group = group
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        # A daemon, since it may wait for a process that has died when this one ends.
        threading.Thread(target=self._make_all, name=name, daemon=True).start()

    def put(self, call: Callable[[], object]) -> None:
        self._calls.put(call)

    def settle(self) -> None:
        """Wait for the calls so far."""
        is_done = threading.Event()
        self._calls.put(is_done.set)
        is_done.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the thread after its calls."""
        self._calls.put(None)

    def _make_all(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # the thread of `follow` raises it
                self._failure = error
                self._group.remind(StepFailed(error))


def in_group(
    executor: DeviceExecutor,
    group: ProcessGroup,
    processes: Processes | None = None,
    *,
    strict: bool = False,
    transports: Callable[..., KVTransport] = make_transport,
) -> ProcessExecutor:
    """Return a `LeadingExecutor` in process 0, and a `FollowingExecutor` in every other process.

    `processes` are those of the encode group and of the decode group, None for one group. If
    `strict`, compiling a copy between groups after the warm-up raises.
    """
    transport = None if processes is None else transports(executor, group, processes)
    role = LeadingExecutor if group.is_leader else FollowingExecutor
    return role(executor, group, processes, transport, strict=strict)


def allocate_host(entries: DeviceStage | DevicePages, group: ProcessGroup) -> None:
    """Allocate the memory of host pages and states of every process. Every process must call it.

    A process without enough memory then fails at the start, not in a step: every process raises
    HostMemoryError.
    """
    failure = None
    try:
        entries.allocate_host()
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
