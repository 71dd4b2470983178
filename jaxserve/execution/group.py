"""Executors of a model that several processes serve together: one leads, the others follow.

The leader schedules. It sends each plan to the followers before it carries the plan out itself.
Each process drives its own devices. Processes with devices of one group call the same executables
in the same order, and every device of the group has the results. Where two device groups belong to
different processes, each process has a share in the work (`group_shares`).
"""

from __future__ import annotations

import abc
import enum
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import (
    HostMemoryError,
    InvalidConfigError,
    ProcessGroupError,
    RuntimeClosedError,
)
from jaxserve.execution.couriers import Courier, Processes, make_courier
from jaxserve.execution.device import DeviceExecutor
from jaxserve.execution.group_shares import FollowersShare, GroupShare, InOrder, LeadersShare
from jaxserve.execution.page_copies import DevicePages
from jaxserve.execution.protocol import StepHandle
from jaxserve.memory.disk_tier import HostMemory
from jaxserve.memory.relocation import Moves
from jaxserve.scheduling.kv.swap_space import SwapCosts
from jaxserve.scheduling.plan import StepPlan
from predictor import Refinement
from sharding import ProcessGroup


@final
class Order(enum.Enum):
    """A message of the leader other than a plan: return from `follow`, or close."""

    DISMISS = enum.auto()
    CLOSE = enum.auto()


@final
@dataclass(frozen=True)
class ParamsUpdated:
    """A message that the leader has replaced the parameters `count` times; so must a follower."""

    count: int


class GroupExecutor(abc.ABC):
    """This process's executor in a group; see `ModelExecutor` and `GroupRole`.

    Args:
      executor: the executor of this process's devices; `close` closes it too.
      share: this process's share in the work of two device groups; None with one group.
    """

    def __init__(
        self, executor: DeviceExecutor, group: ProcessGroup, share: GroupShare | None = None
    ):
        self._executor = executor
        self._group = group
        self._group_share = share
        self._num_updates = 0

    @property
    def config(self) -> EngineConfig:
        return self._executor.config

    @property
    def swap_costs(self) -> SwapCosts | None:
        """See `Executor`. All processes measure together, and the leader plans by its own times."""
        return self._executor.swap_costs

    @property
    def refinement(self) -> Refinement | None:
        return self._executor.refinement

    @property
    def host_memory(self) -> HostMemory | None:
        """None, since each process can read its own part of a host page only."""
        return None

    @property
    def group(self) -> Self:
        return self

    @property
    def num_device_groups(self) -> int:
        return 1 if self._group_share is None else 2

    @property
    def can_resize(self) -> bool:
        """False, since the processes would have to agree on the size."""
        return False

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
        """See `ModelExecutor`. All processes call the functions, in this order."""
        more = [] if self._group_share is None else self._group_share.warmup_steps()
        return [*self._executor.warmup_steps(), *more]

    @property
    def prepares_in_parallel(self) -> bool:
        """False, since the processes compile in the same order."""
        return False

    def use_idle_time(self) -> bool:
        """See `Executor`."""
        return False

    def reset(self) -> bool:
        """Return False, since a step may have failed on one process alone."""
        return False

    def warm_up_behind(self) -> bool:
        """Return False, see `prepares_in_parallel`."""
        return False

    def is_ready(self) -> bool:
        """Return True, since nothing is made behind requests."""
        return True

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

    @abc.abstractmethod
    def submit(self, plan: StepPlan) -> StepHandle: ...

    @abc.abstractmethod
    def update_params(self, params: Any) -> None: ...

    @abc.abstractmethod
    def close(self) -> None: ...

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
        self._group.broadcast(Order.DISMISS)

    def submit(self, plan: StepPlan) -> StepHandle:
        self._group.broadcast(plan)
        return self._carrier.submit(plan)

    def update_params(self, params: Any) -> None:
        """See `ModelExecutor`. Every follower must do the same before the next plan."""
        self._executor.update_params(params)
        self._num_updates += 1
        self._group.broadcast(ParamsUpdated(self._num_updates))

    def close(self) -> None:
        """Close the executors of all processes."""
        self._group.let_go()  # a follower may have ended before this process has closed its own
        self._group.broadcast(Order.CLOSE)
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
            self._is_over = self._carry_out() is Order.CLOSE

    def dismiss(self) -> None:
        raise self._refusal()

    def submit(self, plan: StepPlan) -> StepHandle:
        """Raise ProcessGroupError: plans come from the leader."""
        raise self._refusal()

    def update_params(self, params: Any) -> None:
        """See `ModelExecutor`. Call it between two calls of `follow`, once per leader's update."""
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

    def _carry_out(self) -> Order:
        while not isinstance(order := self._group.receive(), Order):
            if isinstance(order, ParamsUpdated):
                self._check_updates(order.count)
            else:
                self._carrier.carry_out(order)
        self._carrier.settle()
        return order

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
    """Return `executor` in this process's role: leading in process 0, following in the others.

    Args:
      processes: those of the encode group and those of the decode group; None for one group.
      strict: raise on any compilation of a copy between groups after the warm-up.
      couriers: makes this process's part in handovers, of the first three arguments.
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

    So a process that lacks it ends the start of all, not a step that the others compute.

    Raises:
      HostMemoryError: a process does not have the memory; every process raises it.
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
    """Check that `settings` are the same on all processes. Every process must call it.

    Raises:
      InvalidConfigError: a setting differs; every process raises it.
    """
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
