"""Sends requests to replicas, and again when a replica dies."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import final

from jaxserve.core.clock import WallClock
from jaxserve.core.errors import (
    EngineFailedError,
    JaxserveError,
    ReplicaDiedError,
    RuntimeClosedError,
)
from jaxserve.core.request import Completion, Sample, Timing
from jaxserve.engine.answers import PieceSink, failed_completion
from jaxserve.fleet.call import Call
from jaxserve.fleet.replica import Replica, Started
from jaxserve.fleet.shown import Shown
from jaxserve.scheduling.router import Router, answered_pages, predicted_tokens

_log = logging.getLogger(__name__)

# Processes of one replica that may die before they serve, in a row.
_MAX_STARTS = 3


@final
@dataclass(frozen=True, kw_only=True)
class ReplicaState:
    """One replica as it stands.

    Attributes:
      started: None while it is loading, or when it could not be replaced.
      error: why it could not be replaced.
      num_unfinished: requests that it is answering.
      work: tokens that these may still take, as the router counts them.
      num_deaths: processes that this one is the successor of.
    """

    started: Started | None
    error: JaxserveError | None
    num_unfinished: int
    work: int
    num_deaths: int


@final
@dataclass(eq=False)
class _Seat:
    """The place of one replica, which others take over when it dies."""

    replica: Replica
    started: Started | None = None
    error: JaxserveError | None = None
    num_unfinished: int = 0
    num_deaths: int = 0


@final
@dataclass(eq=False)
class _Open:
    """A request without an answer, and who is working on it."""

    call: Call
    shown: Shown | None = None
    index: int | None = None
    replica: Replica | None = None
    is_cancelled: bool = False


@final
class Dispatcher:
    """Answers requests from replicas that may die; its methods are safe from any thread.

    What happens to a request is one coroutine, and everything that moves belongs to the thread of
    one asyncio loop. When a replica dies its seat is taken by a new one, and its unfinished
    requests are sent to another, each of them once: one that loses its second replica fails alone,
    with `ReplicaDiedError`. While no replica serves, requests wait; when none ever will, they fail
    with the reason.

    Args:
      make_replica: called on that thread; must not wait.
      page_size: tokens a page, for routing.
    """

    def __init__(self, make_replica: Callable[[], Replica], num_replicas: int, *, page_size: int):
        self._make_replica = make_replica
        self._clock = WallClock()
        self._router = Router(num_replicas, page_size=page_size)
        self._page_size = page_size
        self._requests: dict[str, _Open] = {}
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()  # set, and replaced, when a replica or a request has changed
        self._starts: set[asyncio.Task[None]] = set()
        self._door = threading.Lock()
        self._is_closed = False
        self._seats = [_Seat(make_replica()) for _ in range(num_replicas)]
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="jaxserve-fleet", daemon=True
        )
        self._thread.start()

    @property
    def replicas(self) -> tuple[ReplicaState, ...]:
        """A snapshot."""
        return tuple(
            ReplicaState(
                started=seat.started,
                error=seat.error,
                num_unfinished=seat.num_unfinished,
                work=work,
                num_deaths=seat.num_deaths,
            )
            for seat, work in zip(self._seats, self._router.work, strict=True)
        )

    def start(self) -> list[Future[Started]]:
        """Start every replica; a future each, which raises what prevented it. Call once."""
        return [
            asyncio.run_coroutine_threadsafe(self._start(seat), self._loop) for seat in self._seats
        ]

    def submit(self, call: Call, sink: PieceSink | None = None) -> Future[Completion]:
        """Answer a request; whatever happens to it, the future gets a completion.

        Args:
          sink: gets the answer's pieces before, each once and an end of every sample, on the
            dispatcher's thread, which must not wait.

        Raises:
          RuntimeClosedError
        """
        with self._door:  # what has come through is there before `close` looks
            if self._is_closed:
                raise RuntimeClosedError("this fleet was closed; create a new one")
            request = _Open(call, None if sink is None else Shown(sink, call.params.n))
            return asyncio.run_coroutine_threadsafe(self._serve(request), self._loop)

    def cancel(self, request_id: str) -> None:
        """End a request as it stands; unknown or finished ones are left alone."""
        with self._door:
            if not self._is_closed:
                asyncio.run_coroutine_threadsafe(self._cancel(request_id), self._loop)

    def close(self) -> None:
        """End every request that has not ended, and every replica."""
        if threading.current_thread() is self._thread:  # where a garbage collector may call it
            threading.Thread(target=self.close).start()
            return
        with self._door:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- on the loop's thread ----

    async def _serve(self, request: _Open) -> Completion:
        completion = await self._completion(request)
        if request.shown is not None:
            request.shown.end(completion)
        return completion

    async def _completion(self, request: _Open) -> Completion:
        call, arrival_s = request.call, self._clock.now()
        self._requests[call.id] = request
        try:
            return await self._answer(request)
        except JaxserveError as error:
            return self._failed(call, error, arrival_s)
        except asyncio.CancelledError:
            error = RuntimeClosedError("the fleet was closed before this request had ended")
            return self._failed(call, error, arrival_s)
        except Exception as cause:  # whoever waits, for a completion or for pieces, gets an end
            _log.exception("request %s failed as none should", call.id)
            error = EngineFailedError(
                f"the fleet could not answer: {type(cause).__name__}: {cause}; report this with "
                "the traceback of __cause__"
            )
            error.__cause__ = cause
            return self._failed(call, error, arrival_s)
        finally:
            del self._requests[call.id]

    async def _answer(self, request: _Open) -> Completion:
        """From the first replica that lives long enough, of at most two."""
        died_at: int | None = None
        while not request.is_cancelled:
            serving = [i for i, seat in enumerate(self._seats) if seat.started is not None]
            if not serving:
                self._raise_if_hopeless()
                await self._news.wait()
                continue
            try:
                return await self._ask(request, [i for i in serving if i != died_at] or serving)
            except ReplicaDiedError as error:
                if died_at is not None:
                    raise ReplicaDiedError(
                        "two replicas died while they were answering this request, which is not "
                        f"tried again; the second: {error}"
                    ) from error
                died_at = request.index
        return _cancelled(request.call, arrival_s=self._clock.now())

    async def _ask(self, request: _Open, among: list[int]) -> Completion:
        call = request.call
        started = self._seats[among[0]].started
        assert started is not None
        work = predicted_tokens(
            call.num_prompt_tokens, call.params, max_context=started.max_context
        )
        request.index = self._router.route(call.pages, work, among=among)
        seat = self._seats[request.index]
        replica = request.replica = seat.replica
        seat.num_unfinished += 1
        shown = request.shown
        try:
            if shown is not None:
                shown.begin()
            completion = await replica.answer(call, None if shown is None else shown.show)
        except ReplicaDiedError as error:
            if seat.replica is replica:
                self._replace(request.index, error)
            raise
        finally:
            request.replica = None
            if seat.replica is replica:
                seat.num_unfinished -= 1
                self._router.finish(request.index, work)
        if call.has_tokens and seat.replica is replica:
            for pages in answered_pages(completion, self._page_size):
                self._router.remember(request.index, pages)
        return completion

    def _replace(self, index: int, error: ReplicaDiedError) -> None:
        seat = self._seats[index]
        _log.warning("replica %d died, and is replaced: %s", index, error)
        seat.replica.kill()
        self._router.forget(index)
        seat.num_deaths += 1
        seat.num_unfinished = 0
        seat.started = None
        seat.replica = self._make_replica()
        start = self._loop.create_task(self._start_again(index))
        self._starts.add(start)
        start.add_done_callback(self._starts.discard)

    async def _start_again(self, index: int) -> None:
        try:
            await self._start(self._seats[index])
        except JaxserveError as error:
            _log.error("replica %d could not be replaced: %s", index, error)

    async def _start(self, seat: _Seat) -> Started:
        try:
            for _ in range(_MAX_STARTS - 1):
                try:
                    seat.started = await seat.replica.start()
                    return seat.started
                except ReplicaDiedError:
                    seat.replica.kill()
                    seat.replica = self._make_replica()
            seat.started = await seat.replica.start()
            return seat.started
        except JaxserveError as error:
            seat.error = error
            raise
        finally:
            self._tell()

    def _raise_if_hopeless(self) -> None:
        errors = [seat.error for seat in self._seats if seat.error is not None]
        if len(errors) == len(self._seats):
            raise ReplicaDiedError(
                f"no replica is left, and none could be replaced: {errors[0]}; create a new fleet"
            ) from errors[0]

    async def _cancel(self, request_id: str) -> None:  # as `_serve`, so that it comes after it
        request = self._requests.get(request_id)
        if request is None:
            return
        request.is_cancelled = True
        if request.replica is not None:
            request.replica.cancel(request_id)
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _end_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for seat in self._seats:
            seat.replica.kill()

    def _failed(self, call: Call, error: JaxserveError, arrival_s: float) -> Completion:
        timing = Timing(arrival_s=arrival_s, finished_s=self._clock.now())
        return failed_completion(call.id, (), error, timing)


def _cancelled(call: Call, arrival_s: float) -> Completion:
    """Of a request that no replica was answering."""
    sample = Sample(text="", token_ids=(), finish_reason="cancelled")
    return Completion(
        request_id=call.id,
        prompt_token_ids=(),
        samples=(sample,) * call.params.n,
        timing=Timing(arrival_s=arrival_s, finished_s=arrival_s),
    )
