"""The engines of one runtime, one for each replica of its parameters, and their router."""

from __future__ import annotations

import heapq
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import final

from jaxserve.core.clock import Clock
from jaxserve.core.errors import (
    EngineBusyError,
    InvalidConfigError,
    InvalidRequestError,
    JaxserveError,
    ProcessGroupError,
    QueueFullError,
    RuntimeClosedError,
)
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Completion, Request
from jaxserve.core.sizes import parse_bytes
from jaxserve.engine.answers import Answer
from jaxserve.engine.engine import Engine
from jaxserve.engine.grammars import Grammars
from jaxserve.engine.loop import EngineLoop, Running, check_running
from jaxserve.engine.recorder import RequestLog
from jaxserve.execution.build import resized
from jaxserve.execution.compilation import warm_up
from jaxserve.execution.device_errors import out_of_memory_as
from jaxserve.execution.executor import ProcessRole
from jaxserve.execution.memory_plan import PoolSize
from jaxserve.execution.model_executor import ModelExecutor
from jaxserve.kernels import dispatch
from jaxserve.memory.disk_tier import DiskTier
from jaxserve.memory.page_cache import Tier
from jaxserve.planning.schedules.plan import SchedulePlan
from jaxserve.report import Report
from jaxserve.scheduling.bounds import Outlook
from jaxserve.scheduling.kv.transfer import KVPages
from jaxserve.scheduling.lengths import first_prediction
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.router import Router, answered_pages, page_hashes, predicted_tokens

_log = logging.getLogger(__name__)
# The smallest pool, without a page that a sequence could use: the null page, and one more.
_NO_PAGES = 2

# Number of answers that a call checks, if the queue seems full, to find some that have begun.
_MAX_LOOKED_AT = 128


@final
@dataclass
class Replica:
    """An engine with its own devices, page pool, slots, scheduler and thread."""

    executor: ModelExecutor
    pool_size: PoolSize
    engine: Engine
    loop: EngineLoop[Answer]

    def warm_up(self, options: RuntimeOptions, *, waits: bool = False) -> None:
        """Compile for the present pool size, unless that was done; `waits` for all of it."""
        if options.warmup and not self.executor.is_warm:
            behind = options.warms_up_behind and not waits
            warm_up(
                self.executor,
                progress=options.progress,
                behind=behind,
                for_one=options.is_for_one,
            )

    def free_pool(self) -> None:
        """Free the page pool until `take_pool`; no step follows before. The loop is paused.

        Every sequence is recomputed when it continues. The scheduler keeps the size of the pool.
        """
        self.engine.drop_kv()
        self.executor.resize(_NO_PAGES, ())

    def take_pool(self) -> None:
        """Allocate the pool after `free_pool`, or raise DeviceMemoryError; the loop is paused."""
        self.executor.resize(self.engine.scheduler.config.num_pages, ())

    def resize(self, size: PoolSize) -> None:
        """Resize the pool, or raise DeviceMemoryError and change nothing; the loop is paused."""
        self.engine.resize(size.num_pages)
        self.pool_size = size

    def recompute(self, size: PoolSize, exchange: Callable[[], None]) -> int:
        """Replace the caches; return the number of tokens to recompute. The loop is paused.

        The pool of `size` holds answers at least as long as before. If `exchange`, which replaces
        the executor's caches, raises, they are as large as before.
        """
        num_tokens = self.engine.drop_kv()
        exchange()
        self.engine.pool_exchanged(size.num_pages)
        self.pool_size = size
        return num_tokens


@final
@dataclass(frozen=True, eq=False)
class _Placed:
    answer: Answer
    replica: int
    work: int


@final
class Replicas:
    """The replicas of one runtime, to which requests are routed. It is thread-safe.

    When one engine fails, all later requests fail; requests that run on other engines end as usual.
    The executors have had their warm-up; the caller closes them afterwards.

    Attributes:
      all: the replicas, in the order of the mesh's `data` axis.
      are_asleep: whether page pools are freed (`Runtime.sleep`).
      have_weights: whether the weights were not dropped.
      placing: held while weights are placed, so that no devices move between groups.
    """

    def __init__(
        self,
        executors: Sequence[tuple[ModelExecutor, PoolSize]],
        policy: Policy,
        clock: Clock,
        options: RuntimeOptions,
        *,
        logs: Sequence[RequestLog] = (),
        disks: Sequence[DiskTier] = (),
        grammars: Grammars | None = None,
    ):
        engines = [
            Engine(executor, policy, clock, replica=index, disk=disk, grammars=grammars, logs=logs)
            for index, ((executor, _), disk) in enumerate(
                zip(executors, disks or [None] * len(executors), strict=True)
            )
        ]
        self.all = tuple(
            Replica(executor, size, engine, EngineLoop(engine, clock, name="jaxserve-engine"))
            for (executor, size), engine in zip(executors, engines, strict=True)
        )
        self._process_id = os.getpid()
        self._notice: threading.Timer | None = None  # that the runtime is paused
        self.are_asleep = False
        self.have_weights = True
        self.placing = threading.Lock()
        self._states = threading.Lock()  # held while they fall asleep, wake up or resume
        self._options = options
        config = self.first.executor.config
        self._page_size = config.page_size
        self._max_context = config.max_context
        self._router = Router(len(self.all), page_size=config.page_size)
        self._lock = threading.Lock()
        self._placed: dict[str, _Placed] = {}
        self._max_waiting = options.max_waiting
        # Waiting answers, and some that waited at the last look; empty without a limit.
        self._waiting: OrderedDict[str, Answer] = OrderedDict()
        # Ids of the answers to look at next, the last one first.
        self._to_look_at: list[str] = []
        # Ids of requests that are about to be submitted.
        self._claimed: set[str] = set()

    @property
    def first(self) -> Replica:
        return self.all[0]

    @property
    def group(self) -> ProcessRole | None:
        """The role of this process; None if it serves the model alone."""
        return self.first.executor.group

    def check_leads(self) -> None:
        if self.group is not None:
            self.group.check_leads()

    def check_awake(self) -> None:
        """Raise EngineBusyError while page pools, and perhaps weights, are freed."""
        if self.are_asleep:
            raise EngineBusyError(
                "this runtime has given back its memory (rt.sleep); call rt.wake_up() first"
            )

    def check_has_weights(self, before: str) -> None:
        if not self.have_weights:
            raise InvalidConfigError(
                "this runtime has dropped its weights (rt.sleep); call rt.update_params(params) "
                f"before {before}"
            )

    def check_may_wait(self) -> None:
        """Raise InvalidRequestError on an engine's thread, which would deadlock if it waited."""
        if any(replica.loop.is_here for replica in self.all):
            raise InvalidRequestError(
                "this call waits for the engines, but was made on an engine's thread, by an "
                "on_piece or a callback of a future; make it on another thread"
            )

    def max_prompt_tokens(self) -> int:
        """Return the length of the longest prompt that any replica can answer with one token."""
        return min(replica.engine.scheduler.config.max_prompt_tokens for replica in self.all)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a prompt and its answer together, on any replica."""
        return min(replica.engine.scheduler.config.max_length for replica in self.all)

    @contextmanager
    def claimed(self, requests: Sequence[Request]) -> Iterator[set[str]]:
        """Reserve ids and places in the queue for `submit_claimed` within the block.

        Raises:
          RuntimeClosedError, EngineFailedError: any replica was closed or has failed.
          ProcessGroupError: this process follows.
          InvalidRequestError: a request with this id is running or about to be submitted.
          QueueFullError: more requests than `max_waiting` would wait; none is claimed.
        """
        self._check_is_open()
        self._say_if_paused()
        with self._lock:
            self._refuse_open_ids(requests)
            self._refuse_if_full(len(requests))
            ids = {request.id for request in requests}
            self._claimed |= ids
        try:
            yield ids
        finally:
            with self._lock:
                self._claimed -= ids

    def submit(self, *answers: Answer) -> None:
        with self.claimed([answer.request for answer in answers]) as claimed:
            self.submit_claimed(claimed, *answers)

    def submit_claimed(self, claimed: set[str], *answers: Answer) -> None:
        """Hand answers to the engines; the answers on one replica start in the same iteration.

        `claimed` comes from `self.claimed` for their requests; it is empty afterwards. If any
        replica was closed or has failed, RuntimeClosedError or EngineFailedError is raised.
        """
        self._check_is_open()
        several, size = len(self.all) > 1, self._page_size
        pages = [page_hashes(each.request.prompt, size) if several else () for each in answers]
        with self._lock:
            self._claimed -= claimed
            claimed.clear()
            placed = [self._place(*each) for each in zip(answers, pages, strict=True)]
            if self._max_waiting is not None:
                self._waiting.update((answer.request.id, answer) for answer in answers)
        for one in placed:
            one.answer.future.add_done_callback(partial(self._release, one))
        try:
            for index, replica in enumerate(self.all):
                replica.loop.submit(*(one.answer for one in placed if one.replica == index))
        except JaxserveError:  # the loop ended since the check
            for one in placed:
                self.cancel(one.answer.request.id)
                self._release(one)
            raise

    def expect(self, answer: Answer, prediction: LengthPrediction) -> None:
        """Give a submitted answer its late prediction, unless it has ended.

        A later request with the same id does not get the prediction.
        """
        with self._lock:
            placed = self._placed.get(answer.request.id)
        if placed is None or placed.answer is not answer:
            return
        replica = self.all[placed.replica]
        replica.loop.tell(lambda: answer.expect(prediction, replica.engine.scheduler))

    def cancel(self, request_id: str) -> None:
        """End a request with the tokens so far; do nothing if it has ended or is unknown."""
        with self._lock:
            placed = self._placed.get(request_id)
        if placed is not None:
            self.all[placed.replica].loop.cancel(request_id)

    def outlook(self) -> dict[str, Outlook]:
        self.check_leads()
        self.check_may_wait()
        found: dict[str, Outlook] = {}
        for replica in self.all:
            found |= replica.loop.ask(replica.engine.outlook)
        return found

    @contextmanager
    def paused(
        self, running: Running = "finish", *, until_s: float | None = None
    ) -> Iterator[None]:
        """Pause every loop within the block, as `EngineLoop.paused` does."""
        self.check_may_wait()
        with ExitStack() as pauses:
            for replica in self.all:
                pauses.enter_context(replica.loop.paused(running, until_s=until_s))
            yield

    # ---- pauses, memory and cached pages: `Runtime` documents each ----

    @property
    def are_paused(self) -> bool:
        return self.first.loop.is_halted

    def _say_if_paused(self) -> None:
        """Log a warning, once a pause, if the runtime is paused now and for another second.

        Another thread may be about to resume it; if none is, submitted requests wait forever.
        """
        if self.are_paused and self._notice is None:
            self._notice = threading.Timer(1.0, self._say_that_it_is_paused)
            self._notice.daemon = True
            self._notice.start()

    def _say_that_it_is_paused(self) -> None:
        if self.are_paused:
            _log.warning(
                "requests wait: this runtime is %s, until %s is called",
                "asleep" if self.are_asleep else "paused",
                "rt.wake_up()" if self.are_asleep else "rt.resume()",
            )

    def pause(self, running: Running) -> None:
        check_running(running)
        self.check_leads()
        self.check_may_wait()
        with ExitStack() as if_one_fails:
            for replica in self.all:
                if not replica.loop.is_halted:
                    if_one_fails.callback(replica.loop.go_on)
                replica.loop.halt(running)
            if_one_fails.pop_all()

    def resume(self) -> None:
        with self._states:
            self._go_on()

    def _go_on(self) -> None:
        self.check_awake()
        if self._notice is not None:
            self._notice.cancel()
            self._notice = None
        for replica in self.all:
            replica.loop.go_on()

    def sleep(self, *, drops_weights: bool) -> None:
        first = self.first.executor
        if not first.can_resize or first.num_device_groups > 1:
            raise InvalidConfigError(
                "the memory of a model that several processes or two groups of devices serve "
                "cannot be given back; close the runtime, and create another one afterwards"
            )
        with self._states:
            self.pause("keep")
            with self.paused("keep"):
                self.have_weights = self.have_weights and not drops_weights
                self.are_asleep = True  # even if the rest fails: `wake_up` repairs it
                for replica in self.all:
                    replica.free_pool()
                    if drops_weights:
                        replica.executor.drop_params()

    def wake_up(self) -> None:
        self.check_has_weights("rt.wake_up()")
        with self._states:
            with (
                out_of_memory_as("taking memory again", "free memory of the trainer first"),
                self.paused("keep"),
            ):
                for replica in self.all if self.are_asleep else ():
                    replica.take_pool()
                self.are_asleep = False
                for replica in self.all:
                    replica.warm_up(self._options)
            self._go_on()

    def dismiss_followers(self) -> None:
        self.check_leads()
        with self.paused():
            if self.group is not None:
                self.group.dismiss()

    def residency(self, token_ids: Sequence[int]) -> list[Tier]:
        found = [r.engine.residency(token_ids) for r in self.all]
        return min(found, key=lambda tiers: tiers.count("nowhere"))

    def export_kv(self, token_ids: Sequence[int], first: int, *, waits: bool) -> KVPages:
        self._check_is_alone()
        found = [
            replica.loop.ask(partial(replica.engine.export_kv, token_ids, first, waits=waits))
            for replica in self.all
        ]
        return max(found, key=lambda kv: len(kv.pages))

    def import_kv(self, token_ids: Sequence[int], kv: KVPages) -> int:
        self._check_is_alone()
        return min(
            replica.loop.ask(partial(replica.engine.import_kv, token_ids, kv))
            for replica in self.all
        )

    def forget_kept_pages(self) -> None:
        self.check_leads()
        with self.paused("keep"):
            for replica in self.all:
                replica.engine.forget_kept_pages(keeps_disk=False)

    def resize_kv(self, size: int | str) -> int:
        kv_bytes = 0 if size == 0 else parse_bytes(size)
        self.check_leads()
        self.check_awake()
        if not all(replica.executor.can_resize for replica in self.all):
            raise InvalidConfigError(
                f"size={size!r}: the page pool of a model that several processes serve cannot be "
                "resized; close the runtime on all of them and create one with another kv_memory"
            )
        with out_of_memory_as("resizing the page pool", "pass a smaller size"):
            for replica in self.all:
                replica.pool_size.step.measure()  # which may compile, while requests run
            with self.paused("keep"):
                self._resize(kv_bytes)
        return self.first.pool_size.pool_bytes

    def _resize(self, kv_bytes: int) -> None:
        """Resize every replica's pool, and compile for the new size.

        On a DeviceMemoryError the failing replica and those after it keep their size.
        """
        sizes = [resized(r.executor, r.pool_size, kv_bytes) for r in self.all]
        for replica, size in zip(self.all, sizes, strict=True):
            if size.num_pages != replica.executor.config.num_pages:
                replica.resize(size)
            replica.warm_up(self._options)

    def _check_is_alone(self) -> None:
        self.check_may_wait()
        self.check_awake()
        if self.group is not None:
            raise ProcessGroupError(
                "KV is neither exported nor imported where several processes serve one model; use "
                "one process for each runtime"
            )

    @property
    def work(self) -> tuple[int, ...]:
        """Expected tokens of unfinished requests, by replica; all 0 if every request has ended."""
        return self._router.work

    def check_integrity(self) -> None:
        self.check_leads()
        self.check_may_wait()
        for replica in self.all:
            replica.loop.ask(replica.engine.scheduler.check_integrity)

    def report(self, plan: SchedulePlan | None = None) -> Report:
        """Return steps in the order of submission, and requests in the order of their ends."""
        recorders = [replica.engine.recorder for replica in self.all]
        steps = heapq.merge(*(r.steps for r in recorders), key=lambda step: step.submitted_s)
        requests = heapq.merge(
            *(r.requests for r in recorders), key=lambda request: request.timing.finished_s or 0.0
        )
        return Report(
            tuple(steps),
            tuple(requests),
            policy=self.first.engine.scheduler.policy.name,
            schedule=None if plan is None else plan.figures(),
            num_pages=sum(replica.executor.config.num_pages - 1 for replica in self.all),
            kernels=dispatch.choices(),
            num_prefix_queried=sum(r.engine.stats.num_prefix_queried for r in self.all),
            num_prefix_hit=sum(r.engine.stats.num_prefix_hit for r in self.all),
        )

    def close(self) -> None:
        """Cancel unfinished requests, stop the threads and save cached pages to the disk tiers."""
        for replica in self.all:
            replica.loop.close()
        for replica in self.all:
            replica.engine.close(is_whole=not replica.loop.has_failed)

    def _check_is_open(self) -> None:
        if os.getpid() != self._process_id:
            raise RuntimeClosedError(
                "this runtime belongs to the process that made it, and a forked child has none of "
                "its threads; create the runtime in the child, or start children with "
                "multiprocessing's method 'spawn' and have this process answer"
            )
        self.check_leads()
        for replica in self.all:
            replica.loop.check()

    def _refuse_open_ids(self, requests: Sequence[Request]) -> None:
        for request in requests:
            known = self._placed.get(request.id)
            is_open = known is not None and not known.answer.future.done()
            if is_open or request.id in self._claimed:
                raise InvalidRequestError(
                    f"a request with the id {request.id!r} is still running; pass another id, or "
                    "no id to have one generated"
                )

    def _refuse_if_full(self, num_requests: int) -> None:
        most = self._max_waiting
        if most is None:
            return
        num_new = len(self._claimed) + num_requests
        if len(self._waiting) + num_new > most:
            self._drop_begun()
        if len(self._waiting) + num_new > most:
            num_waiting = len(self._waiting) + len(self._claimed)
            raise QueueFullError(
                f"{num_waiting} requests wait, and {num_requests} more were submitted; "
                f"max_waiting={most}. Submit them when others have begun, or pass a larger "
                "max_waiting"
            )

    def _drop_begun(self) -> None:
        """Drop leading answers from `_waiting` that have begun, and some of the rest.

        A call looks at `_MAX_LOOKED_AT` answers. Until later calls have looked at all, some that
        have begun count as waiting: at most as many as have begun and not ended.
        """
        waiting = self._waiting
        while waiting and not waiting[first := next(iter(waiting))].waits:
            del waiting[first]
        if not self._to_look_at or len(waiting) <= _MAX_LOOKED_AT:
            self._to_look_at = list(reversed(waiting))
        for key in [self._to_look_at.pop() for _ in self._to_look_at[:_MAX_LOOKED_AT]]:
            answer = waiting.get(key)
            if answer is not None and not answer.waits:
                del waiting[key]

    def _place(self, answer: Answer, pages: Sequence[int]) -> _Placed:
        request = answer.request
        prediction = first_prediction(request, self.first.executor.refinement)
        work = predicted_tokens(
            len(request.prompt), request.params, prediction, max_context=self._max_context
        )
        placed = _Placed(answer, self._router.route(pages, work), work)
        if request.id in self._placed:  # a request with this id has ended; its callback is due
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
        """Remove an ended request from the router's load; a second call does nothing."""
        if self._placed.get(placed.answer.request.id) is placed:
            del self._placed[placed.answer.request.id]
            self._waiting.pop(placed.answer.request.id, None)
            self._router.finish(placed.replica, placed.work)
