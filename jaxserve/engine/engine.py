"""The host loop: plan, submit, collect the step before."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from os import urandom
from typing import Any, final

from jaxserve.core.clock import Clock
from jaxserve.core.request import Request
from jaxserve.engine.recorder import Recorder
from jaxserve.engine.stats import EngineStats
from jaxserve.execution.protocol import Executor, StepHandle
from jaxserve.memory.disk_tier import DiskTier
from jaxserve.memory.eviction import RecomputeCost
from jaxserve.memory.page_cache import Tier
from jaxserve.scheduling.kv.costs import SwapCosts
from jaxserve.scheduling.kv.manager import KVManager
from jaxserve.scheduling.lengths.outlook import Outlook, outlooks
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.policy import IterationShape, Policy
from jaxserve.scheduling.scheduler import Progress, Scheduler
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class _InFlight:
    plan: StepPlan
    handle: StepHandle


@final
class Engine:
    """Drives an executor with a policy's plans. Not thread-safe: one loop owns it.

    Args:
      executor: a device or a simulation.
      policy: which sequences run, when, and with how much memory.
      clock: the executor's own clock when it is simulated.
      max_in_flight: steps submitted but not read; 2 keeps the device busy while the host plans.
      replica: which of a runtime's engines this is, for the records.
      disk: keeps the cached pages that leave the executor's host memory, and what former runs
        left. `close` closes it.

    Attributes:
      changed: notified, on another thread, when something has come from the disk: `step` has work
        then. Nothing else of an engine is for other threads.
    """

    def __init__(
        self,
        executor: Executor,
        policy: Policy,
        clock: Clock,
        *,
        max_in_flight: int = 2,
        replica: int = 0,
        disk: DiskTier | None = None,
    ):
        self.changed = threading.Condition()
        self._kv = KVManager(
            executor.config,
            policy,
            clock.now,
            costs=executor.swap_costs,
            disk=disk,
            host_memory=executor.host_memory,
            on_arrival=self._notify,
        )
        self.scheduler = Scheduler(policy, clock, self._kv, executor.refinement)
        self.stats = EngineStats(clock)
        self.recorder = Recorder(executor.config, replica)
        self._clock = clock
        self._executor = executor
        self._max_in_flight = max_in_flight
        self._in_flight: deque[_InFlight] = deque()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def idle_until_s(self) -> float | None:
        """Until when the device may idle although sequences wait; None where it may not.

        The policy waits for more sequences then, or the sequences for the disk.
        """
        if self._in_flight or self._kv.has_arrived:
            return None
        return self.scheduler.wake_s

    @property
    def awaits_disk(self) -> bool:
        """Whether a waiting sequence's pages are on their way from the disk."""
        return self._kv.gives_up_s is not None

    def outlook(self) -> dict[str, Outlook]:
        """Return what is expected of the requests that have tokens left to compute, by id."""
        return outlooks(self.scheduler, self.recorder.iteration_s)

    def add(self, request: Request) -> list[Sequence]:
        """Take in a validated request; its samples wait for their turn."""
        return self.scheduler.add(request)

    def step(self) -> list[Progress]:
        """Submit the next step, then read the oldest one that is due; returns its news.

        The plan for the next step is made and submitted before the step before it is read, so the
        device has work while the host catches up.
        """
        begin_s = time.perf_counter()
        plan = self.scheduler.plan()
        self.stats.after_plan(time.perf_counter() - begin_s)
        if plan is not None:
            gap_before_s = self.stats.host_gap_s
            self.stats.before_submit(self._newest_handle())
            self.recorder.step_submitted(
                plan, self.scheduler, self._clock.now(), self.stats.host_gap_s - gap_before_s
            )
            self._in_flight.append(_InFlight(plan, self._executor.submit(plan)))
            self.stats.after_submit(plan, self.scheduler)
        if not self._in_flight:
            if self.has_work and self.scheduler.wake_s is None:
                raise AssertionError("work is left, but no step can be planned")
            return []
        if plan is not None and len(self._in_flight) < self._max_in_flight:
            return []
        return self._collect()

    def drain(self) -> list[Progress]:
        """Read every step that is in flight; returns its news. No step is submitted."""
        news = []
        while self._in_flight:
            news += self._collect()
        return news

    def residency(self, tokens: Seq[int]) -> list[Tier]:
        """Return the fastest tier on which each full page of a context lies."""
        return self._kv.residency(tokens)

    def value_by(self, cost: RecomputeCost) -> None:
        """Value cached pages by what computing them costs, from here on."""
        self._kv.value_by(cost)

    def swap_by(self, costs: SwapCosts | None) -> None:
        """Decide between copying and recomputing pages by these costs, from here on.

        Args:
          costs: None to take every copy to be worth it.
        """
        self._kv.swap_by(costs)

    def preload(self, tokens: Seq[int], contents: bytes) -> bool:
        """Cache the full pages of `tokens` on the host; False where it has no room for all.

        Args:
          contents: of each page, as `HostMemory.read_host_page` gives them.
        """
        return self._kv.preload(tokens, contents)

    def evict(self, tokens: Seq[int], pages: Iterable[int]) -> None:
        """Evict full pages of a context, by index, that lie on the device and in no sequence."""
        self._kv.evict(tokens, pages)

    def forget_kept_pages(self, *, keeps_disk: bool) -> None:
        """Find nothing that was computed before now; `drain` first.

        Args:
          keeps_disk: go on finding what the disk has of the weights that there are now.
        """
        assert not self._in_flight, "steps are in flight; drain() first"
        self._kv.clear(b"" if keeps_disk else urandom(8))

    def close(self, *, is_whole: bool) -> None:
        """Move cached pages to the disk, where there is one; nothing may run any more.

        Args:
          is_whole: False after a failure; then nothing more is written.
        """
        if not self._kv.has_disk:
            return
        try:
            if not is_whole:
                return
            self._kv.save()
            while plan := self.scheduler.plan_flush():
                self._executor.submit(plan).collect()
                self._kv.save()
        finally:
            self._kv.close()

    def adopt(self, iteration: IterationShape[Any]) -> None:
        """Plan by another iteration shape, or by other settings of the same one, from now on.

        To be called between two steps, which may be in flight. No request is lost or preempted.
        """
        self.scheduler.adopt(iteration)

    def resize(self, num_pages: int) -> None:
        """Serve from a pool of `num_pages` pages; `drain` first.

        Live pages move only where they have to. Sequences are preempted until the others fit, and
        fail where they fit no more, even alone.

        Raises:
          DeviceMemoryError: the executor could not; all go on in the old pool.
        """
        assert not self._in_flight, "steps are in flight; drain() first"
        moves = self.scheduler.make_room(num_pages)
        self._executor.resize(num_pages, moves)
        self.scheduler.resize(num_pages, moves)

    def abandon(self) -> None:
        """Drop what is in flight, for shutting down."""
        self._in_flight.clear()

    def _collect(self) -> list[Progress]:
        oldest = self._in_flight.popleft()
        result = oldest.handle.collect()
        self.stats.after_collect(self._newest_handle())
        self.recorder.step_collected(self._clock.now())
        return self.scheduler.apply(oldest.plan, result)

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _newest_handle(self) -> StepHandle | None:
        return self._in_flight[-1].handle if self._in_flight else None
