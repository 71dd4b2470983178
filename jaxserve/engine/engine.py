"""The engine: plan a step, submit it, collect the previous one, and deliver its tokens."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from os import urandom
from typing import Any, final

from jaxserve.core.clock import Clock
from jaxserve.core.errors import (
    HostMemoryError,
    InvalidParamsError,
    JaxserveError,
    StepMemoryError,
    is_out_of_memory,
)
from jaxserve.core.request import Completion, Request
from jaxserve.engine.answers import Answer, OpenAnswers, Weights
from jaxserve.engine.constraints import Constraints, GrammarSource
from jaxserve.engine.loop import EngineBase, Running
from jaxserve.engine.recorder import EngineObserver, EngineStats, Recorder, RequestLog
from jaxserve.execution.executor import Executor, StepHandle
from jaxserve.memory.disk_tier import DiskTier
from jaxserve.memory.eviction import RecomputeCost
from jaxserve.memory.page_cache import Tier
from jaxserve.scheduling.bounds import Deferred, Outlook, outlooks
from jaxserve.scheduling.kv.manager import KVManager
from jaxserve.scheduling.kv.transfer import KVPages, WeightsName
from jaxserve.scheduling.plan import LINK, Row, StepPlan, StepResult, nothing_delivered
from jaxserve.scheduling.policy import IterationShape, Policy
from jaxserve.scheduling.scheduler import Progress, Scheduler, check_has_groups
from jaxserve.scheduling.sequence import Sequence

_log = logging.getLogger(__name__)

# Share of a step that runs before the next one is planned, while requests arrive, if it is as fast
# as the fastest of the newest ones: late enough for most requests to be in it, and early enough for
# the device not to wait. At least this many times the host's time for a step is left.
_LATE = 0.6
_HOST_TIMES = 3.0
# How often a loop that waits so looks whether the step has ended.
_LOOKS = 8


@final
class _SwapCosts(EngineObserver):
    """Tells the KV manager what swaps cost, which executors measure after their start."""

    def __init__(self, executor: Executor, kv: KVManager):
        self._executor = executor
        self._kv = kv
        self._known = executor.swap_costs

    def on_submitted(self, plan: StepPlan, scheduler: Scheduler) -> None:
        if self._known is not self._executor.swap_costs:
            self._known = self._executor.swap_costs
            self._kv.swap_by(self._known)


@final
class Engine(EngineBase[Answer]):
    """Drives an executor with a policy's plans. It is not thread-safe: one loop owns it.

    A loop calls `begin` with answers, which get their tokens. Simulations call `add` with requests,
    and read the progress that `step` returns.

    Args:
      clock: the clock of the records; the executor's own clock if it is simulated.
      max_in_flight: maximum number of steps that are submitted and not collected; 2 keeps the
        device busy while the host plans.
      replica: index of this engine in its runtime, for the records.
      grammars: compiled grammars, which answers obey; None to let tokens be any.
      disk: tier for the cached pages that leave the executor's host memory, and for the pages of
        earlier runs; None for no disk tier. `close` closes it.
      logs: get every request that began and ended, unless the loop itself failed.

    Attributes:
      weights: those that the next steps compute with.
      changed: condition that another thread notifies when pages have come from the disk, so that
        `step` has work. Other threads may use no other attribute of an engine.

    Raises:
      InvalidConfigError: the policy plans for more device groups than the executor has.
    """

    memory_remedy = "pass a smaller kv_memory, max_step_tokens or max_slots"

    def __init__(
        self,
        executor: Executor,
        policy: Policy,
        clock: Clock,
        *,
        max_in_flight: int = 2,
        replica: int = 0,
        disk: DiskTier | None = None,
        grammars: GrammarSource | None = None,
        logs: Seq[RequestLog] = (),
    ):
        if policy.num_device_groups > 1:
            check_has_groups(policy, executor.num_device_groups)
        self.changed = threading.Condition()
        self._kv = KVManager(
            executor.config,
            policy,
            clock.now,
            costs=executor.swap_costs,
            disk=disk,
            host_memory=executor.host_memory,
            host_states=executor.host_states,
            on_arrival=self._notify,
        )
        self.stats = EngineStats(clock)
        self.recorder = Recorder(executor.config, self.stats, replica)
        self._observers = (self.stats, self.recorder, _SwapCosts(executor, self._kv))
        self._logs = logs
        self.scheduler = Scheduler(policy, clock, self._kv, executor.refinement, self.recorder.pace)
        self._constraints = Constraints(self.scheduler, grammars)
        self._answers = OpenAnswers(self.scheduler, self.on_ended)
        self.weights = Weights()
        self._deferred = Deferred()
        self._clock = clock
        self._executor = executor
        self._max_in_flight = max_in_flight
        self._next_plan_s = self._look_s = 0.0
        groups = range(policy.num_device_groups)
        lanes = groups if len(groups) == 1 else (LINK, *groups)
        # Of each device group, and of the link between them: in order, the steps not yet read.
        self._in_flight: dict[int, deque[tuple[StepPlan, StepHandle]]] = {
            lane: deque() for lane in lanes
        }

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def idle_until_s(self) -> float | None:
        """The time until which the device may idle although sequences wait; None if it may not.

        It may while the policy waits for more sequences, or while sequences wait for the disk. It
        does not while a step runs, after which the next one is planned late (`plans_late`).
        """
        if self.plans_late:
            return min(self._next_plan_s, self._clock.now() + self._look_s)
        if self._is_at_work:
            return None
        return None if self._kv.retrieval.has_arrived else self.scheduler.wake_s

    @property
    def plans_late(self) -> bool:
        """Whether the next step is not planned yet, so that requests that arrive now are in it.

        False as soon as the running step is over: loops end early, with the last of their answers.
        """
        is_early = self._clock.now() < self._next_plan_s
        return is_early and not any(map(_is_idle, self._in_flight.values()))

    @property
    def awaits_disk(self) -> bool:
        return self._kv.retrieval.gives_up_s is not None

    def outlook(self) -> dict[str, Outlook]:
        return outlooks(self.scheduler, self.recorder.iteration_s)

    def add(self, request: Request) -> list[Sequence]:
        """Add a validated request to the waiting pool, and return its sequences.

        If other requests run or wait, and it is expected to miss a bound of its own, they have
        failed with BoundNotMetError, or fail so in a later `step` (`scheduling.bounds`).
        """
        pace = self.recorder.pace() if request.has_bounds and self.has_work else None
        sequences = self.scheduler.add(request)
        if request.has_bounds:
            late = self._deferred.add(self.scheduler, sequences, pace, self._clock.now())
            for sequence in sequences if late is not None else ():
                self.scheduler.end(sequence, "error", late)
        if request.awaits_tokens:
            self._constraints.begin(sequences)
            self.stats.take_in(self._constraints.counters())
        return sequences

    # ---- for its loop ----

    def begin(self, job: Answer) -> None:
        self._answers.begin(job, self.add(job.request), self.weights)

    def cancel(self, id: str) -> None:
        self._answers.cancel(id)

    def rest(self) -> None:
        if not self._is_at_work:
            self.stats.end_busy_period()

    def make_room(self, running: Running) -> None:
        if running == "finish":
            return
        self._answers.deliver(self.drain())
        if running == "restart":
            self._answers.restart()
        elif running == "abort":
            self._answers.cancel_all()

    def settle(self) -> None:
        self._answers.go_on_with(self.weights)

    def cancel_all(self) -> None:
        self._answers.cancel_all()

    def fail_all(self, error: JaxserveError, not_begun: Seq[Answer]) -> None:
        self._answers.fail(error, not_begun, self._clock.now())
        self._abandon()

    def on_ended(self, request: Request, completion: Completion) -> None:
        """Tell the observers, and the logs, of a request that has ended."""
        for observer in self._observers:
            observer.on_ended(request, completion)
        for log in self._logs:
            log.append(request, completion)

    # ---- steps ----

    def step(self) -> list[Progress]:
        """Submit the next step, then collect the oldest one if it is due; return the progress.

        The next step is planned and submitted before the previous one is collected, so that the
        device has work while the host applies results; while requests arrive, a loop calls this
        when a part of the running step is over (`plans_late`). Each of several device groups has
        its own steps in flight.
        """
        news = self._refuse_late()
        begin_s = self._clock.now()
        try:
            plan = self._plan()
        except HostMemoryError as error:  # pages from the disk have no room; nothing is planned
            news += self._go_on_without([], error)
        else:
            news += self._collect_if_due() if plan is None else self._submit(plan, begin_s)
        self._answers.deliver(news)
        return news

    def _plan(self) -> StepPlan | None:
        begin_s = time.perf_counter()
        plan = self.scheduler.plan(self._open_groups)
        self.stats.planning_s += time.perf_counter() - begin_s
        return None if plan is None else self._constraints.masked(plan)

    def _submit(self, plan: StepPlan, begin_s: float) -> list[Progress]:
        lane = self._in_flight[plan.group]
        for observer in self._observers:
            observer.on_planned(plan, self.scheduler, is_idle=_is_idle(lane))
        try:
            lane.append((plan, self._executor.submit(plan)))
        except Exception as error:
            return self._go_on_without([plan], error)
        for observer in self._observers:
            observer.on_submitted(plan, self.scheduler)
        if self._open_groups:
            return []
        host_s = self._clock.now() - begin_s
        news = self._collect()
        wait_s = self._wait_s(plan, host_s)
        self._next_plan_s, self._look_s = self._clock.now() + wait_s, wait_s / _LOOKS
        return news

    def _wait_s(self, running: StepPlan, host_s: float) -> float:
        """Return how long to wait for requests before the step after `running` is planned."""
        if not self.scheduler.expects_arrivals:
            return 0.0
        step_s = self.recorder.least_s(running)
        return min(_LATE * step_s, step_s - _HOST_TIMES * host_s)

    def _collect_if_due(self) -> list[Progress]:
        if self._is_at_work:
            return self._collect()
        if self.has_work and self.scheduler.wake_s is None:
            raise AssertionError("work is left, but no step can be planned")
        return []

    def _collect(self) -> list[Progress]:
        lane = self._first_lane()
        plan, handle = lane.popleft()
        try:
            result = handle.collect()
        except Exception as error:
            # Later steps read what it wrote.
            later = [each for lane in self._in_flight.values() for each, _ in lane]
            self._abandon()
            return self._go_on_without([plan, *later], error)
        return self._apply(plan, result)

    def _apply(self, plan: StepPlan, result: StepResult) -> list[Progress]:
        is_idle = _is_idle(self._in_flight[plan.group])
        for observer in self._observers:
            observer.on_collected(plan, is_idle=is_idle)
        self.scheduler.speculation.take_in(plan, result, self.recorder.newest_step_s)
        news = self.scheduler.apply(plan, result)
        if plan.masks is not None:
            self._constraints.take_in(plan, news)
            self.stats.take_in(self._constraints.counters())
        return news

    def _go_on_without(self, lost: Seq[StepPlan], error: Exception) -> list[Progress]:
        """Collect what is in flight, and continue without KV after lost steps.

        Raises `error` unless memory was too small, or the parameters were deleted.
        """
        news = self.drain()
        lost_params = self._executor.has_lost_params
        if not (lost_params or is_out_of_memory(error)) or not self._executor.reset():
            raise error
        self.stats.num_lost_steps += len(lost)
        of_lost = [each for plan in lost for each in self._apply(plan, nothing_delivered(plan))]
        if lost_params:
            of_lost += _fail_without_params(self.scheduler)
        else:
            fail_and_restart(self.scheduler, of_lost, lost[0].rows if lost else (), error)
        self.forget_kept_pages(keeps_disk=True)
        if isinstance(error, HostMemoryError):
            self._kv.close_host()
        return news + of_lost

    def _refuse_late(self) -> list[Progress]:
        """End the requests that have not begun and can no longer keep their latency bounds."""
        news = []
        late = self._deferred.late(self.scheduler, self.recorder.pace, self._clock.now())
        for sequence, error in late:
            self.scheduler.end(sequence, "error", error)
            news.append(Progress(sequence, 0))
        return news

    def use_idle_time(self) -> bool:
        if self._is_at_work:
            return False
        self.stats.end_busy_period()
        try:
            return self._executor.use_idle_time()
        except Exception as error:
            self._go_on_without([], error)
            return False

    def drain(self) -> list[Progress]:
        """Collect every step in flight and return their progress, without submitting a step."""
        news = []
        while self._is_at_work:
            news += self._collect()
        return news

    def residency(self, tokens: Seq[int]) -> list[Tier]:
        return self._kv.residency(tokens)

    def value_by(self, cost: RecomputeCost) -> None:
        self._kv.value_by(cost)

    def export_kv(self, tokens: Seq[int], first: int = 0, *, waits: bool = True) -> KVPages:
        """Return the contents of cached full pages of a context, from page `first` on.

        They pass through host memory, as far as it has room. Steps may be in flight. If the
        executor fails, the pages to copy are no longer on the host. Unless it `waits`, missing
        copies are left to the next steps, and only pages already copied are returned.
        """
        self._kv.transfer.copy_to_host(tokens, first)
        if not waits:
            plans = (plan for lane in self._in_flight.values() for plan, _ in lane)
            on_the_way = {page for plan in plans for _, page in plan.swaps_out}
            return self._kv.transfer.read(tokens, first, on_the_way=on_the_way)
        plan = self.scheduler.plan_flush(0.0)
        try:
            if plan is not None:
                self._executor.submit(plan).collect()
            return self._kv.transfer.read(tokens, first)
        except Exception:
            if plan is not None:
                self._kv.transfer.copies_failed(plan.swaps_out)
            raise

    def import_kv(self, tokens: Seq[int], kv: KVPages) -> int:
        """Cache leading full pages of `tokens`, exported elsewhere, as `PageTransfer.load` does."""
        return self._kv.transfer.load(tokens, kv)

    def evict(self, tokens: Seq[int], pages: Iterable[int]) -> None:
        """Evict full pages of a context, by index, that are cached on the device and not owned."""
        self._kv.evict(tokens, pages)

    def forget_kept_pages(self, *, keeps_disk: bool) -> None:
        """Drop cached pages, and past answers for proposals. Call `drain` first.

        The disk's pages of these weights are kept if `keeps_disk`.
        """
        assert not self._is_at_work, "steps are in flight; drain() first"
        restart_awaiting(self.scheduler)
        self._kv.clear(b"" if keeps_disk else urandom(8))
        self.scheduler.speculation.forget_answers()

    def name_of(self, version: int) -> WeightsName:
        return self._kv.weights.name_of(version)

    def weights_changed(self, weights: Weights, name: WeightsName, *, keeps_kv: bool) -> None:
        """Continue with new weights of the executor, under this name. Call `drain` first.

        If `keeps_kv`, sequences keep their KV on the device, and no other sequence reuses it; else
        it is recomputed.
        """
        assert not self._is_at_work, "steps are in flight; drain() first"
        if keeps_kv:
            restart_awaiting(self.scheduler)
        else:
            restart_computed(self.scheduler)
        self._kv.weights_changed(name, (*self.scheduler.running, *self.scheduler.waiting))
        self.weights = weights

    def close(self, *, is_whole: bool) -> None:
        """Move cached pages to the disk tier, if there is one. No step may follow.

        After a failure (not `is_whole`) no page is written.
        """
        try:
            if is_whole and self._kv.has_disk:
                self._kv.save()
                while plan := self.scheduler.plan_flush():
                    self._executor.submit(plan).collect()
                    self._kv.save()
        finally:
            self._kv.close()

    def adopt(self, iteration: IterationShape[Any]) -> None:
        """Plan by another iteration shape, between two steps, as `Scheduler.adopt` does."""
        self.scheduler.adopt(iteration)

    def resize(self, num_pages: int) -> None:
        """Resize the pool to `num_pages` pages. Call `drain` first.

        Live pages move only if they have to. Sequences are preempted until the others fit. A
        sequence that would not fit even alone fails.

        Raises:
          DeviceMemoryError: the executor could not resize; every sequence continues in the old
            pool.
        """
        assert not self._is_at_work, "steps are in flight; drain() first"
        moves = self.scheduler.make_room(num_pages)
        self._executor.resize(num_pages, moves)
        self.scheduler.resize(num_pages, moves)

    def drop_kv(self) -> int:
        """Drop all KV for recomputation; return the number of computed tokens lost.

        Call `drain` first. Sequences keep their tokens; those that ran wait before the other ones.
        """
        assert not self._is_at_work, "steps are in flight; drain() first"
        num_tokens = restart_computed(self.scheduler)
        self.forget_kept_pages(keeps_disk=True)
        return num_tokens

    def pool_exchanged(self, num_pages: int) -> None:
        """Update page accounting after the executor replaced its pool since `drop_kv`."""
        moves = self.scheduler.make_room(num_pages)
        assert not moves, "a page is owned, although nothing runs"
        self.scheduler.resize(num_pages, moves)

    def _abandon(self) -> None:
        for lane in self._in_flight.values():
            lane.clear()

    @property
    def _is_at_work(self) -> bool:
        return any(self._in_flight.values())

    @property
    def _open_groups(self) -> tuple[int, ...]:
        return tuple(g for g, lane in self._in_flight.items() if len(lane) < self._max_in_flight)

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _first_lane(self) -> deque[tuple[StepPlan, StepHandle]]:
        """Return the steps in flight of the group that completes one first."""
        lanes = [lane for lane in self._in_flight.values() if lane]
        while len(lanes) > 1:
            for lane in lanes:
                if lane[0][1].is_ready():
                    return lane
            self._clock.wait()
        return lanes[0]


def _is_idle(lane: deque[tuple[StepPlan, StepHandle]]) -> bool:
    """Return whether a device group may be idle: its newest step is computed, if there is one."""
    return not lane or lane[-1][1].is_ready()


def restart_computed(scheduler: Scheduler) -> int:
    """Recompute every sequence with KV, none in flight; return the number of tokens lost."""
    swapped_out = (sequence for sequence in scheduler.waiting if sequence.kv.host_pages)
    computed = (*scheduler.running, *swapped_out)
    num_tokens = sum(sequence.kv.num_computed for sequence in computed)
    for sequence in computed:
        scheduler.restart(sequence, keeps_output=True)
    return num_tokens


def restart_awaiting(scheduler: Scheduler) -> None:
    """Recompute what awaits pages from the host, before cached pages are dropped there."""
    for sequence in tuple(scheduler.running):
        if sequence.kv.awaits is not None:
            scheduler.restart(sequence, keeps_output=True)


def _fail_without_params(scheduler: Scheduler) -> list[Progress]:
    """Fail every sequence, since none can be computed before the next update; return the news."""
    error = InvalidParamsError(
        "the weights of this runtime were deleted, as arrays are that a jitted function gets as "
        "donated arguments; pass the present ones to rt.update_params(params), and submit the "
        "request again. Do not donate parameters that a runtime serves: it shares their arrays"
    )
    news = []
    for sequence in (*scheduler.running, *scheduler.waiting):
        scheduler.end(sequence, "error", error)
        news.append(Progress(sequence, 0))
    return news


def fail_and_restart(
    scheduler: Scheduler, news: Iterable[Progress], rows: Iterable[Row], error: Exception
) -> None:
    """Fail the sequences in rows of a step without memory, and recompute all other ones.

    If the host's memory ran out, none fails: without host pages they can be computed. `news` is
    that of all lost steps, this one included.
    """
    failed = {row.sequence_key for row in rows}
    if isinstance(error, HostMemoryError):
        _log.warning("KV is not copied to the host any more: %s", error)
        failed.clear()
    out_of_memory = StepMemoryError(
        f"the device ran out of memory in a step with this request ({error}); submit it again, "
        "and pass a smaller kv_memory, max_step_tokens or max_slots if that happens again"
    )
    for sequence in {each.sequence for each in news if each.sequence.key in failed}:
        scheduler.end(sequence, "error", out_of_memory)
    for sequence in (*scheduler.running, *scheduler.waiting):
        scheduler.restart(sequence, keeps_output=True)
