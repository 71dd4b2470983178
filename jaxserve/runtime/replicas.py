"""The engines of one runtime, one for each replica of its parameters, behind one door."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, final

from jaxserve.core.clock import Clock
from jaxserve.core.errors import InvalidRequestError, JaxserveError, ProcessGroupError
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.request import Completion
from jaxserve.engine.answers import Answer
from jaxserve.engine.engine import Engine
from jaxserve.engine.loop import EngineLoop, Running
from jaxserve.engine.request_log import RequestLog
from jaxserve.execution.build import build_executor, resized, warm_up
from jaxserve.execution.following import FollowingExecutor
from jaxserve.execution.leading import LeadingExecutor
from jaxserve.execution.memory_plan import PoolSize
from jaxserve.execution.protocol import ModelExecutor
from jaxserve.memory.disk_tier import DiskTier, HostMemory
from jaxserve.memory.eviction import RecomputeCost
from jaxserve.report import Report
from jaxserve.runtime.placing import Place
from jaxserve.runtime.processes import in_group
from jaxserve.scheduling.outlook import Outlook
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.router import Router, answered_pages, page_hashes, predicted_tokens
from jaxserve.steps.probing import Probe
from pallas_kernels import dispatch
from sharding import ProcessGroup, split_replicas

WrapExecutor = Callable[[ModelExecutor], ModelExecutor]


@final
@dataclass
class Replica:
    """One engine with its own devices, page pool, slots, scheduler and thread."""

    executor: ModelExecutor
    pool_size: PoolSize
    engine: Engine
    loop: EngineLoop


@final
@dataclass(frozen=True, eq=False)
class _Placed:
    answer: Answer
    replica: int
    work: int


def build_executors(
    graphdef: Any,
    places: Sequence[Place],
    decoder: Any,
    options: RuntimeOptions,
    group: ProcessGroup | None,
    probe: Probe | None = None,
    wrap: WrapExecutor | None = None,
) -> list[tuple[ModelExecutor, PoolSize]]:
    """An executor for each place; all are closed again when one cannot be built.

    Args:
      wrap: see `Runtime`.

    Raises:
      DeviceMemoryError, InvalidConfigError
    """
    with ExitStack() as if_one_fails:
        built = []
        for place in places:
            executor, size = build_executor(
                graphdef,
                place.params,
                decoder.config,
                decoder.layer_layout,
                options,
                place.stages,
                group,
                probe,
            )
            if_one_fails.callback(executor.close)
            placed = in_group(executor, group)
            built.append((placed if wrap is None else wrap(placed), size))
        if_one_fails.pop_all()
    return built


@final
class Replicas:
    """Routes requests to engines that answer alike. Thread-safe.

    A failed engine fails all of them for later requests; those that run elsewhere end as usual.

    Attributes:
      all: in the order of the mesh's `data` axis.
    """

    def __init__(
        self,
        executors: Sequence[tuple[ModelExecutor, PoolSize]],
        policy: Policy,
        clock: Clock,
        logs: Sequence[RequestLog] = (),
        disks: Sequence[DiskTier] = (),
    ):
        engines = [
            Engine(executor, policy, clock, replica=index)
            for index, (executor, _) in enumerate(executors)
        ]
        for engine, (executor, _), disk in zip(engines, executors, disks, strict=False):
            engine.use_disk(disk, cast(HostMemory, executor))
        self.all = tuple(
            Replica(executor, size, engine, EngineLoop(engine, clock, logs))
            for (executor, size), engine in zip(executors, engines, strict=True)
        )
        config = self.first.executor.config
        self._page_size = config.page_size
        self._max_context = config.max_context
        self._router = Router(len(self.all), page_size=config.page_size)
        self._lock = threading.Lock()
        self._placed: dict[str, _Placed] = {}

    @property
    def first(self) -> Replica:
        return self.all[0]

    @property
    def follower(self) -> FollowingExecutor | None:
        """What carries out another process's plans; None where this one plans."""
        executor = self.first.executor
        return executor if isinstance(executor, FollowingExecutor) else None

    def check_leads(self) -> None:
        """Raise ProcessGroupError where this process only follows."""
        if self.follower is not None:
            raise ProcessGroupError(self.follower.refusal)

    def check_may_wait(self) -> None:
        """Refuse to wait for the engines on the thread of one, where that would never end.

        Raises:
          InvalidRequestError
        """
        if any(replica.loop.is_here for replica in self.all):
            raise InvalidRequestError(
                "this call waits for the engines, and was made on the thread of one, by an "
                "on_piece or a callback of a future; make it on another thread"
            )

    def dismiss_followers(self) -> None:
        """See `Runtime.dismiss_followers`; the loops must be paused."""
        if isinstance(self.first.executor, LeadingExecutor):
            self.first.executor.dismiss()

    @property
    def max_prompt_tokens(self) -> int:
        """Of a prompt that any replica can take."""
        return min(replica.executor.config.max_prompt_tokens for replica in self.all)

    def submit(self, *answers: Answer) -> None:
        """Hand over answers; those that go to one replica start in the same iteration.

        Raises:
          RuntimeClosedError, EngineFailedError: of any replica.
          ProcessGroupError: this process only follows.
          InvalidRequestError: a request of that id is still running.
        """
        self.check_leads()
        for replica in self.all:
            replica.loop.check()
        with self._lock:
            self._refuse_open_ids(answers)
            placed = [self._place(answer) for answer in answers]
        for one in placed:
            one.answer.future.add_done_callback(partial(self._release, one))
        try:
            for index, replica in enumerate(self.all):
                replica.loop.submit(*(one.answer for one in placed if one.replica == index))
        except JaxserveError:  # it ended since the check
            for one in placed:
                self.cancel(one.answer.request.id)
                self._release(one)
            raise

    def cancel(self, request_id: str) -> None:
        """End a request as it stands; unknown or finished ones are left alone."""
        with self._lock:
            placed = self._placed.get(request_id)
        if placed is not None:
            self.all[placed.replica].loop.cancel(request_id)

    def outlook(self) -> dict[str, Outlook]:
        """See `Runtime.outlook`."""
        self.check_leads()
        self.check_may_wait()
        found: dict[str, Outlook] = {}
        for replica in self.all:
            found |= replica.loop.ask(replica.engine.outlook)
        return found

    @contextmanager
    def paused(self, running: Running | Literal["keep"] = "finish") -> Iterator[None]:
        """Keep every loop from its engine for the length of the block; see `EngineLoop.paused`."""
        self.check_may_wait()
        with ExitStack() as pauses:
            for replica in self.all:
                pauses.enter_context(replica.loop.paused(running))
            yield

    def update_params(self, params: Any, running: Running) -> None:
        """See `Runtime.update_params`."""
        parts = split_replicas(params)
        if len(parts) != len(self.all):  # on other devices than the replicas
            parts = [params] * len(self.all)
        fitted = [
            replica.executor.fitted(part) for replica, part in zip(self.all, parts, strict=True)
        ]
        with self.paused(running):
            for replica, part in zip(self.all, fitted, strict=True):
                replica.executor.update_params(part)
                replica.engine.forget_kept_pages(keeps_disk=True)

    def forget_kept_pages(self, *, keeps_disk: bool = False) -> None:
        """See `Runtime.forget_kept_pages`; the loops must be paused."""
        for replica in self.all:
            replica.engine.forget_kept_pages(keeps_disk=keeps_disk)

    def value_by(self, cost: RecomputeCost) -> None:
        """What chunks cost to compute anew, from here on; the loops must be paused."""
        for replica in self.all:
            replica.engine.scheduler.keeper.cache.value_by(cost)

    def resize(self, kv_bytes: int, *, warmup: bool, progress: bool) -> None:
        """See `Runtime.resize_kv`; the loops must be paused.

        Args:
          warmup: compile what a new size needs.

        Raises:
          DeviceMemoryError: before anything has changed, or for the replicas from the failing one
            on.
          InvalidConfigError: the model is served by several processes.
        """
        sizes = [resized(r.executor, r.pool_size, kv_bytes) for r in self.all]
        for replica, size in zip(self.all, sizes, strict=True):
            if size.num_pages != replica.executor.config.num_pages:
                replica.engine.resize(size.num_pages)
                replica.pool_size = size
            if warmup and not replica.executor.is_warm:
                warm_up(replica.executor, progress=progress)

    @property
    def work(self) -> tuple[int, ...]:
        """Tokens still expected of what was submitted, by replica; all 0 when everything ended."""
        return self._router.work

    def check_integrity(self) -> None:
        """See `Runtime.check_integrity`."""
        self.check_leads()
        self.check_may_wait()
        for replica in self.all:
            replica.loop.ask(replica.engine.scheduler.check_integrity)

    def report(self) -> Report:
        """Steps in the order of their submission, requests in that of their ends."""
        recorders = [replica.engine.recorder for replica in self.all]
        steps = heapq.merge(*(r.steps for r in recorders), key=lambda step: step.submitted_s)
        requests = heapq.merge(
            *(r.requests for r in recorders), key=lambda request: request.timing.finished_s or 0.0
        )
        return Report(
            tuple(steps),
            tuple(requests),
            policy=self.first.engine.scheduler.policy.name,
            num_pages=sum(replica.executor.config.num_pages - 1 for replica in self.all),
            kernels=dispatch.choices(),
            num_sought=sum(replica.engine.stats.num_sought for replica in self.all),
            num_found=sum(replica.engine.stats.num_found for replica in self.all),
        )

    def close(self) -> None:
        """Cancel what is left, stop the threads and free the page pools."""
        for replica in self.all:
            replica.loop.close()
        try:
            for replica in self.all:
                replica.engine.close(is_whole=not replica.loop.has_failed)
        finally:
            for replica in self.all:
                replica.executor.close()

    def _refuse_open_ids(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            known = self._placed.get(answer.request.id)
            if known is not None and not known.answer.future.done():
                raise InvalidRequestError(
                    f"a request with the id {answer.request.id!r} is still running; give another "
                    "id, or none to have one made up"
                )

    def _place(self, answer: Answer) -> _Placed:
        request = answer.request
        work = predicted_tokens(
            len(request.prompt), request.params, request.prediction, max_context=self._max_context
        )
        pages = page_hashes(request.prompt, self._page_size) if len(self.all) > 1 else ()
        placed = _Placed(answer, self._router.route(pages, work), work)
        if request.id in self._placed:  # it has ended, and its callback is still to come
            self._finish(self._placed[request.id])
        self._placed[request.id] = placed
        return placed

    def _release(self, placed: _Placed, future: Future[Completion] | None = None) -> None:
        pages: list[list[int]] = []
        if future is not None and len(self.all) > 1:
            pages = answered_pages(future.result(), self._page_size)
        with self._lock:
            self._finish(placed)
            for answered in pages:
                self._router.remember(placed.replica, answered)

    def _finish(self, placed: _Placed) -> None:
        """Once for each; what comes later is ignored."""
        if self._placed.get(placed.answer.request.id) is placed:
            del self._placed[placed.answer.request.id]
            self._router.finish(placed.replica, placed.work)
