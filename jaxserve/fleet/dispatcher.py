"""The dispatcher of requests to replicas, which sends them again when a replica dies."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast, final

from jaxserve.core.clock import WallClock
from jaxserve.core.errors import (
    EngineFailedError,
    InvalidRequestError,
    JaxserveError,
    ReplicaDiedError,
    RuntimeClosedError,
)
from jaxserve.core.request import Completion, Timing
from jaxserve.engine.answers import Piece, PieceSink, failed_completion
from jaxserve.engine.loop import Running
from jaxserve.fleet.replica import (
    ReplicaCall,
    ReplicaProcess,
    ReplicaState,
    Role,
    Started,
    cancelled_completion,
    pays,
)
from jaxserve.fleet.seats import FleetUpdate, Seat, Seats
from jaxserve.runtime import RuntimeStats
from jaxserve.scheduling.router import Router, answered_pages, predicted_tokens

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


@final
@dataclass(frozen=True, eq=False)
class Reservation:
    """The replica that is to answer a request, with the expected tokens (`work`) counted for it.

    `index` is that of the seat; `num_cached` leading pages of the prompt are probably cached there.
    """

    index: int
    seat: Seat
    replica: ReplicaProcess
    work: int
    num_cached: int

    @property
    def holds(self) -> bool:
        return self.seat.replica is self.replica


@final
@dataclass(eq=False)
class OpenRequest:
    """A request without a completion, and the replica that works on it."""

    call: ReplicaCall
    replay: StreamReplay | None = None
    index: int | None = None
    replica: ReplicaProcess | None = None
    is_cancelled: bool = False

    def enter(self, index: int, seat: Seat) -> ReplicaProcess:
        """Assign the request to the replica of a seat, which has this index, and return it."""
        seat.num_unfinished += 1
        self.index, self.replica = index, seat.replica
        return seat.replica

    def leave(self, seat: Seat, replica: ReplicaProcess) -> bool:
        """Release the request from its replica; return whether `replica` still has the seat."""
        self.replica = None
        if seat.replica is not replica:
            return False
        seat.num_unfinished -= 1
        return True

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.replica is not None:
            self.replica.cancel(self.call.id)


@final
@dataclass
class _Extent:
    token_ids: list[int] = field(default_factory=list)
    num_characters: int = 0
    num_reasoned: int = 0  # characters of the thinking
    num_reasoning: int = 0  # tokens of the thinking


@final
class StreamReplay:
    """A filter of the pieces of one request, which passes each token, character and end on once.

    Every replica should generate the same tokens, perhaps in other pieces. If a replica generates
    other tokens, this is logged, and its later tokens follow those that were already passed on. The
    pieces go to `sink`, which must not wait.
    """

    def __init__(self, sink: PieceSink, num_samples: int):
        self._sink: PieceSink | None = sink
        self._shown = [_Extent() for _ in range(num_samples)]
        self._given: list[_Extent] = []
        self._has_ended = [False] * num_samples
        self._differs = False
        self.begin()

    def begin(self) -> None:
        """Expect the pieces of a replica that starts the request, from the first token on."""
        self._given = [_Extent() for _ in self._shown]

    def show(self, piece: Piece) -> None:
        """Pass on the new part of a piece, but not an error's end: another replica may succeed."""
        i = piece.sample_index
        if piece.finish_reason == "error" or self._has_ended[i]:
            return
        given, shown = self._given[i], self._shown[i]
        known = shown.token_ids[len(given.token_ids) :][: len(piece.token_ids)]
        tokens = piece.token_ids[len(known) :]
        text = piece.text[max(0, shown.num_characters - given.num_characters) :]
        reasoning = piece.reasoning[max(0, shown.num_reasoned - given.num_reasoned) :]
        if known != list(piece.token_ids[: len(known)]) and not self._differs:
            self._differs = True
            _log.warning(
                "a replica generates other tokens than the one that died; the stream continues "
                "with them"
            )
        given.token_ids += piece.token_ids
        given.num_characters += len(piece.text)
        given.num_reasoned += len(piece.reasoning)
        given.num_reasoning += piece.num_reasoning
        num_reasoning = max(0, given.num_reasoning - shown.num_reasoning)
        shown.token_ids += tokens
        shown.num_characters = max(shown.num_characters, given.num_characters)
        shown.num_reasoned = max(shown.num_reasoned, given.num_reasoned)
        shown.num_reasoning = max(shown.num_reasoning, given.num_reasoning)
        self._has_ended[i] = piece.finish_reason is not None
        if tokens or text or reasoning or self._has_ended[i]:
            logprobs = None if piece.logprobs is None else piece.logprobs[len(known) :]
            new = replace(piece, text=text, reasoning=reasoning, num_reasoning=num_reasoning)
            self._pass_on(replace(new, token_ids=tokens, logprobs=logprobs))

    def end(self, completion: Completion) -> None:
        """End the samples that have not ended, with the reasons in the completion."""
        for i, has_ended in enumerate(self._has_ended):
            if not has_ended:
                sample = completion.samples[min(i, len(completion.samples) - 1)]
                reason = sample.finish_reason
                num_cached = completion.num_cached_tokens
                self._pass_on(
                    Piece(
                        text="",
                        token_ids=(),
                        sample_index=i,
                        finish_reason=reason,
                        num_cached_tokens=num_cached,
                    )
                )

    def _pass_on(self, piece: Piece) -> None:
        if self._sink is None:
            return
        try:
            self._sink(piece)
        except Exception:  # a sink's error must not end other requests
            _log.exception("the sink of a stream failed; it gets no more pieces")
            self._sink = None


@final
class Dispatcher:
    """A thread-safe dispatcher, which answers requests with replicas that may die.

    Each request is a coroutine, and all state belongs to the thread of one asyncio loop. When a
    replica dies, a new process takes its seat and its unfinished requests are sent to another
    replica, each of them once: a request whose second replica dies fails with `ReplicaDiedError`.
    While no replica serves, requests wait. When none will serve again, they fail with the reason.

    With prefill replicas, the answering replica is chosen first, and the work is reserved there.
    Then a prefill replica computes the prompt, and its KV goes to the answering replica. If that
    fails, no prefill replica serves, or it does not pay, the answering replica computes the prompt.

    Args:
      make_replica: returns a new replica; called on the loop's thread, so it must not wait.
      page_size: tokens per page, for routing.
      num_prefill: number of prefill replicas, in addition to the `num_replicas` that answer.
    """

    def __init__(
        self,
        make_replica: Callable[[], ReplicaProcess],
        num_replicas: int,
        *,
        page_size: int,
        num_prefill: int = 0,
    ):
        self._clock = WallClock()
        answering = "decode" if num_prefill else "whole"
        given = [answering] * num_replicas + ["prefill"] * num_prefill
        roles = cast("list[Role]", given)
        self._router = Router(len(roles), page_size=page_size)
        self._page_size = page_size
        self._requests: dict[str, OpenRequest] = {}
        # The last known counters of every process, also of those that have died.
        self._counters: dict[ReplicaProcess, RuntimeStats] = {}
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()  # guards the next two attributes
        self._open_ids: set[str] = set()
        self._is_closed = False
        self._seats = Seats(make_replica, roles, on_death=self._router.forget)
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="jaxserve-fleet", daemon=True
        )
        self._thread.start()

    @property
    def replicas(self) -> tuple[ReplicaState, ...]:
        return tuple(
            ReplicaState(
                role=seat.role,
                started=seat.started,
                error=seat.error,
                num_unfinished=seat.num_unfinished,
                work=work,
                num_deaths=seat.num_deaths,
                weights_version=seat.weights_version,
            )
            for seat, work in zip(self._seats, self._router.work, strict=True)
        )

    @property
    def is_serving(self) -> bool:
        return bool(self._seats.serving(answers=True))

    def start(self) -> list[Future[Started]]:
        """Start every replica, once; return a future per replica, with the error of its start."""
        return [
            asyncio.run_coroutine_threadsafe(self._seats.start(index), self._loop)
            for index, _ in enumerate(self._seats)
        ]

    def check_may_wait(self) -> None:
        """Raise InvalidRequestError on the dispatcher's thread, which would deadlock in a wait."""
        if threading.current_thread() is self._thread:
            raise InvalidRequestError(
                "this call waits for the replicas, but was made on the thread that reads their "
                "answers, by an on_piece or a callback of a future; make it on another thread"
            )

    def submit(self, call: ReplicaCall, sink: PieceSink | None = None) -> Future[Completion]:
        """Answer a request; return a future of the completion, which has an error if it fails.

        `sink` is called with each piece once, and with an end of every sample, on the dispatcher's
        thread; it must not wait. Raise `InvalidRequestError` if the request's id is still in use.
        """
        with self._lock:
            self._raise_if_closed()
            if call.id in self._open_ids:
                raise InvalidRequestError(
                    f"a request with the id {call.id!r} is still running; pass another id, or no "
                    "id to have one generated"
                )
            self._open_ids.add(call.id)
            request = OpenRequest(call, None if sink is None else StreamReplay(sink, call.params.n))
            return asyncio.run_coroutine_threadsafe(self._serve(request), self._loop)

    def cancel(self, request_id: str) -> None:
        with self._lock:
            if not self._is_closed:
                asyncio.run_coroutine_threadsafe(self._cancel(request_id), self._loop)

    def stats(self, *, wait: bool = True) -> RuntimeStats:
        """Return the total counters of all processes so far; see `Fleet.stats`."""
        return self._result(lambda: self._stats(wait=wait))

    @property
    def weights_version(self) -> int:
        return self._seats.weights_version

    @property
    def is_paused(self) -> bool:
        return self._seats.is_paused

    def update_params(self, update: FleetUpdate) -> int:
        return self._result(lambda: self._seats.update_params(update))

    def pause(self, running: Running) -> None:
        self._result(lambda: self._seats.pause(running))

    def resume(self) -> None:
        self._result(self._seats.resume)

    def close(self) -> None:
        if threading.current_thread() is self._thread:  # a garbage collector may call it here
            threading.Thread(target=self.close).start()
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise RuntimeClosedError("this fleet was closed; create a new one")

    def _result(self, begin: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Wait for a coroutine on the dispatcher's thread."""
        self.check_may_wait()
        with self._lock:
            self._raise_if_closed()
            found = asyncio.run_coroutine_threadsafe(begin(), self._loop)
        try:
            return found.result()
        except CancelledError:
            raise RuntimeClosedError("this fleet was closed; create a new one") from None

    # ---- on the loop's thread ----

    async def _serve(self, request: OpenRequest) -> Completion:
        completion = await self._completion(request)
        if request.replay is not None:
            request.replay.end(completion)
        self._open_ids.discard(request.call.id)
        return completion

    async def _completion(self, request: OpenRequest) -> Completion:
        call, arrival_s = request.call, self._clock.now()
        self._requests[call.id] = request
        try:
            return await self._answer(request)
        except JaxserveError as error:
            return self._failed(call, error, arrival_s)
        except asyncio.CancelledError:
            error = RuntimeClosedError("the fleet was closed before this request had ended")
            return self._failed(call, error, arrival_s)
        except Exception as cause:  # a waiting caller must get a completion
            _log.exception("request %s failed with an unexpected error", call.id)
            error = EngineFailedError(
                f"the fleet could not answer: {type(cause).__name__}: {cause}; report this with "
                "the traceback of __cause__"
            )
            error.__cause__ = cause
            return self._failed(call, error, arrival_s)
        finally:
            del self._requests[call.id]

    async def _answer(self, request: OpenRequest) -> Completion:
        """Return the completion of the first replica that does not die, of at most two."""
        died_at: int | None = None
        while not request.is_cancelled:
            serving = await self._serving(request)
            if request.is_cancelled:
                break
            among = [i for i in serving if i != died_at] or serving
            reservation = self._reserved(request.call, among)
            try:
                kv = await self._prefilled(request, reservation)
                # It may have died while the prompt was computed; then another one is chosen.
                if not request.is_cancelled and reservation.holds:
                    return await self._ask(request, reservation, kv)
            except ReplicaDiedError as error:
                if died_at is not None:
                    raise ReplicaDiedError(
                        "two replicas died while they were answering this request, which is not "
                        f"tried again; the second: {error}"
                    ) from error
                died_at = reservation.index
            finally:
                if reservation.holds:
                    self._router.finish(reservation.index, reservation.work)
        return cancelled_completion(request.call, arrival_s=self._clock.now())

    async def _serving(self, request: OpenRequest | None = None) -> list[int]:
        """Return the indices of the answering replicas; wait for one, or for a cancellation.

        Raise an error if no replica will serve again.
        """
        while request is None or not request.is_cancelled:
            if serving := self._seats.serving(answers=True):
                return serving
            await self._seats.news()
        return []

    def _reserved(self, call: ReplicaCall, among: list[int]) -> Reservation:
        """Choose the answering replica, and count the work for it from now on."""
        started = self._seats[among[0]].started
        assert started is not None
        work = predicted_tokens(
            call.num_prompt_tokens, call.params, max_context=started.max_context
        )
        cached = {i: self._router.num_cached(i, call.pages) for i in among}
        index = self._router.route(call.pages, work, among=among)
        seat = self._seats[index]
        return Reservation(index, seat, seat.replica, work, cached[index])

    async def _prefilled(self, request: OpenRequest, reservation: Reservation) -> Any:
        """Compute the prompt on a prefill replica; return what `ReplicaProcess.answer` takes.

        Return None if the answering replica computes the prompt itself.
        """
        call, among = request.call, self._seats.serving(answers=False)
        if not (among and pays(call, reservation.num_cached, self._page_size)):
            return None
        work = call.num_prompt_tokens
        index = self._router.route(call.pages, work, among=among)
        replica = request.enter(index, self._seats[index])
        try:
            return await replica.prefill(call)
        except ReplicaDiedError as error:
            self._seats.replace(index, replica, error)
        except JaxserveError as error:
            _log.warning("the prompt of %s is computed where it is answered: %s", call.id, error)
        finally:
            if request.leave(self._seats[index], replica):
                self._router.finish(index, work)
        return None

    async def _ask(self, request: OpenRequest, reservation: Reservation, kv: Any) -> Completion:
        call, replay = request.call, request.replay
        index, seat = reservation.index, reservation.seat
        replica = request.enter(index, seat)
        try:
            if replay is not None:
                replay.begin()
            show = None if replay is None else replay.show
            completion = await replica.answer(call, show, kv)
        except ReplicaDiedError as error:
            self._seats.replace(index, replica, error)
            raise
        finally:
            request.leave(seat, replica)
        if call.has_tokens and seat.replica is replica:
            for pages in answered_pages(completion, self._page_size):
                self._router.remember(index, pages)
        return completion

    async def _stats(self, *, wait: bool) -> RuntimeStats:
        while True:
            if not wait and not self._seats.serving(answers=True):
                raise ReplicaDiedError("no replica serves now; try again later")
            serving = [*await self._serving(), *self._seats.serving(answers=False)]
            found = dict(await asyncio.gather(*(self._stats_of(i) for i in serving)))
            parts = {replica: part for replica, part in found.items() if part is not None}
            for replica, part in parts.items():
                known = self._counters.get(replica)
                if known is None or known.num_steps <= part.num_steps:  # calls may overtake
                    self._counters[replica] = part
            if parts:
                former = [each for replica, each in self._counters.items() if replica not in parts]
                return RuntimeStats.total([*parts.values()], former)

    async def _stats_of(self, index: int) -> tuple[ReplicaProcess, RuntimeStats | None]:
        """Return a replica and its counters, or None if it has died."""
        replica = self._seats[index].replica
        try:
            return replica, await replica.stats()
        except ReplicaDiedError as error:
            self._seats.replace(index, replica, error)
            return replica, None

    async def _cancel(self, request_id: str) -> None:  # a coroutine, so that it runs after `_serve`
        request = self._requests.get(request_id)
        if request is not None:
            request.cancel()
            self._seats.tell()

    async def _end_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._seats.kill()

    def _failed(self, call: ReplicaCall, error: JaxserveError, arrival_s: float) -> Completion:
        timing = Timing(arrival_s=arrival_s, finished_s=self._clock.now())
        return failed_completion(call.id, (), error, timing)
