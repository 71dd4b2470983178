"""Carries out plans on a mesh over several processes, seen from one that does as it is told."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from jaxserve.core.errors import ProcessGroupError, RuntimeClosedError
from jaxserve.execution.device import DeviceExecutor
from jaxserve.execution.group import GroupExecutor
from jaxserve.execution.handle import DeviceHandle
from jaxserve.execution.leading import Order, ParamsUpdated
from jaxserve.scheduling.plan import StepPlan
from sharding import ProcessGroup


@final
class FollowingExecutor(GroupExecutor):
    """Carries out the plans of the leading process, and no others.

    A failure ends all processes: none could go on without this one's devices.
    """

    def __init__(self, executor: DeviceExecutor, group: ProcessGroup):
        super().__init__(executor, group)
        self._is_over = False

    def submit(self, plan: StepPlan) -> DeviceHandle:
        raise ProcessGroupError(self.refusal)

    @property
    def refusal(self) -> str:
        """What to tell who asks this process for answers."""
        return (
            f"this is process {self._group.process_id} of {self._group.num_processes}, which only "
            "follows: ask the Runtime of process 0 (rt.is_leader), and call rt.follow() here"
        )

    def update_params(self, params: Any) -> None:
        """See `ModelExecutor`; between two calls of `follow`, as often as the leader does."""
        self._executor.update_params(params)
        self._num_updates += 1

    def follow(self) -> None:
        """Carry out the leader's plans until it dismisses the followers or closes.

        Ctrl-C is left to the leader meanwhile.

        Raises:
          RuntimeClosedError: it was closed before.
        """
        if self._is_over:
            raise RuntimeClosedError("the leader closed this runtime; create a new one on all")
        with self._group.reporting_failure(), _without_interrupts():
            self._is_over = self._carry_out() is Order.CLOSE

    def close(self) -> None:
        """Give back all device memory. Before the leader has closed that is a failure."""
        if not self._is_over:
            self._is_over = True
            self._group.fail("it closed its runtime before the leader did; call rt.follow() first")
        self._executor.close()
        self._group.release()

    def _carry_out(self) -> Order:
        before: DeviceHandle | None = None
        while not isinstance(order := self._group.receive(), Order):
            if isinstance(order, ParamsUpdated):
                self._check_updates(order.count)
                continue
            newest = self._executor.submit(order)
            if before is not None:
                before.collect()  # where a step that failed says so
            before = newest
        if before is not None:
            before.collect()
        return order

    def _check_updates(self, count: int) -> None:
        if self._num_updates != count:
            raise ProcessGroupError(
                f"the leader has updated the parameters {count} times, this process "
                f"{self._num_updates} times; let the leader call rt.dismiss_followers(), then call "
                "rt.update_params on all processes"
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
