"""The way of one HTTP request through the service: submit its prompts, receive its pieces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import final

from anyio import to_thread

from jaxserve.core.errors import PromptTooLongError, RuntimeClosedError
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece
from jaxserve.engine.pending import Pending
from jaxserve.runtime import Service
from jaxserve.scheduling.lengths import LengthEstimate
from jaxserve.scheduling.presets import get_policy
from jaxserve.server.backend import Backend, CountedRequest
from jaxserve.server.errors import invalid, timed_out
from jaxserve.server.guard import note, notes_here
from jaxserve.server.tracing import trace_here

# Pieces that arrived together, each with the index of its prompt.
Group = list[tuple[int, Piece]]

_FAILED = ("error", "cancelled")
# Seconds for which a stream waits before it sends its status: an earlier error has its own.
STATUS_S = 5.0
# Seconds without a piece after which a stream sends a comment, so that proxies keep it open.
PING_S = 15.0


@final
@dataclass(frozen=True)
class Job:
    """One prompt, as token ids."""

    prompt: list[int]
    params: SamplingParams
    priority: int = 0


@final
class Exchange:
    """The requests of the service that answer one HTTP request. Use it on the event loop.

    `reply_id` is the id of the answer, and of the first prompt's request in the service; the ids of
    further prompts add their number. With `at_once`, prompts are made on the event loop (see
    `routes.common.is_short`). A stream sends its status after `status_s` seconds without a piece.
    `jobs` are the prompts, in the order of the request; known after `start`.
    """

    def __init__(
        self, backend: Backend, reply_id: str, *, at_once: bool = False, status_s: float = STATUS_S
    ):
        self._backend = backend
        self._reply_id = reply_id
        self._at_once = at_once
        self._status_s = status_s
        self._service = backend.ready_service()
        self._timeout_s = backend.options.request_timeout_s
        self.jobs: Sequence[Job] = ()
        self._pending: list[Pending[Completion]] = []
        self._open: dict[int, CountedRequest] = {}
        self._pieces: list[tuple[int, Piece]] = []
        self._num_prompt = self._num_output = 0
        self._notes = notes_here()
        self._trace = trace_here()
        self._last_s: dict[tuple[int, int], float] = {}
        self._estimates: dict[tuple[int, int], LengthEstimate] = {}
        self._news = asyncio.Event()
        self._expiry: asyncio.TimerHandle | None = None
        self._next_ping: asyncio.TimerHandle | None = None
        self._has_expired = False
        self._is_silent = False
        self._is_closed = False

    async def answer(self, make_jobs: Callable[[Service], Sequence[Job]]) -> list[Completion]:
        """Make the prompts, submit them, and return their completions when all have ended.

        Raise the error if a prompt cannot be served, the server has no room for it, or a request
        failed or took too long.
        """
        await self.start(make_jobs)
        return await self.completions()

    async def start(self, make_jobs: Callable[[Service], Sequence[Job]]) -> None:
        """Make the prompts and submit them, on another thread if tokenizing takes time."""
        backend = self._backend
        await backend.check_room(1)
        if self._timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(self._timeout_s, self._expire)
        # Counted from here on, so that a server that drains waits for it.
        self._open = {0: backend.begin()}
        try:
            if self._at_once:
                self._begin(make_jobs)
            else:
                await to_thread.run_sync(self._begin, make_jobs)
            if len(self.jobs) > 1:
                await backend.check_room(len(self.jobs) - 1)
                self._open.update({i: backend.begin() for i in range(1, len(self.jobs))})
                await to_thread.run_sync(self._submit)
        except Exception as error:
            self._end(error)
            raise
        except BaseException:
            self.close()
            raise

    def _begin(self, make_jobs: Callable[[Service], Sequence[Job]]) -> None:
        """Make the prompts; submit a single one at once, since a thread costs time."""
        self.jobs = make_jobs(self._service)
        self._trace.asked(self.jobs[0].params)
        self._check()
        if len(self.jobs) == 1:
            self._submit()

    def _check(self) -> None:
        if any(job.priority for job in self.jobs):
            self._check_has_priorities()
        most = self._backend.options.max_prompt_tokens
        longest = max(len(job.prompt) for job in self.jobs)
        if most is not None and longest > most:
            raise PromptTooLongError(
                f"the prompt has {longest} tokens, and this server allows {most}; shorten it"
            )

    def _check_has_priorities(self) -> None:
        policy = get_policy(self._service.options.policy)
        if not policy.order.heeds_priority:
            raise invalid(
                f"the policy of this server, {policy.name}, does not order requests by priority; "
                "leave priority out",
                "priority",
            )

    def _submit(self) -> None:
        mailbox = self._backend.mailbox
        assert mailbox is not None
        for i, job in enumerate(self.jobs):
            pending = self._service.submit(
                job.prompt,
                job.params,
                request_id=f"{self._reply_id}-{i}" if i else self._reply_id,
                priority=job.priority,
                on_piece=lambda piece, i=i: mailbox.post(partial(self._take, i, piece)),
            )
            self._pending.append(pending)
            # `close` runs on the event loop: requests appended after it are cancelled here.
            if self._is_closed:
                pending.cancel()
                return
            pending.future.add_done_callback(
                lambda future, i=i: mailbox.post(partial(self._finish, i, future))
            )

    async def stream(self, make_jobs: Callable[[Service], Sequence[Job]]) -> AsyncGenerator[Group]:
        """Make the prompts, submit them, and yield the pieces that have arrived, until the end.

        A client that reads slowly gets fewer, larger groups. An empty group says that no piece has
        arrived for `status_s` seconds at the beginning, or for `PING_S` later. The time in which
        prompts are made and submitted, and grammars are compiled, counts too. Errors are as in
        `answer`; if the request has pieces, they come first.
        """
        try:
            loop = asyncio.get_running_loop()
            self._next_ping = loop.call_later(self._status_s, self._ping)
            if self._at_once:
                await self.start(make_jobs)
            else:
                starting = asyncio.ensure_future(self.start(make_jobs))
                starting.add_done_callback(self._has_started)
                try:
                    while not starting.done():
                        await self._news.wait()
                        self._news.clear()
                        self._check_time()
                        if self._is_silent and not starting.done():
                            yield []
                        self._is_silent = False
                    await starting
                finally:
                    starting.cancel()
                self._news.set()  # pieces may have arrived meanwhile
            has_begun = False
            while True:
                await self._news.wait()
                self._news.clear()
                taken, self._pieces = self._pieces, []
                if not has_begun:
                    self._check_time()
                    if not self._open and not any(piece.token_ids for _, piece in taken):
                        self._results()
                    has_begun = bool(taken)
                if taken or (self._is_silent and self._open):
                    yield merged(taken)
                self._is_silent = False
                self._check_time()
                if not self._open and not self._pieces:
                    break
            self._results()
        finally:
            self.close()

    async def completions(self) -> list[Completion]:
        """Wait for the end of all requests, and return their completions."""
        try:
            while self._open:
                await self._news.wait()
                self._news.clear()
                self._check_time()
            return self._results()
        finally:
            self.close()

    def close(self) -> None:
        """Cancel the requests that have not ended. Call it when the client has gone."""
        self._end()

    def _end(self, error: Exception | None = None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for timer in (self._expiry, self._next_ping):
            if timer is not None:
                timer.cancel()
        for pending in self._pending:
            if not pending.future.done():
                pending.cancel()
        while self._open:
            self._backend.end(self._open.popitem()[1])
            if error is None:
                self._backend.metrics.aborted()
            else:
                self._backend.metrics.failed(error)

    def _has_started(self, starting: asyncio.Task[None]) -> None:
        if not starting.cancelled():
            starting.exception()  # mark the error as retrieved, even if the client has left
        self._news.set()

    # ---- on the event loop, from the mailbox ----

    def _take(self, index: int, piece: Piece) -> None:
        if self._is_closed or piece.finish_reason in _FAILED:  # `_finish` has the error
            return
        if piece.token_ids and index in self._open:
            if not self._open[index].has_begun:
                self._backend.metrics.prompted(len(self.jobs[index].prompt))
            self._backend.metrics.generated(len(piece.token_ids))
            self._backend.has_token(self._open[index])
            self._note_gap(index, piece)
            if piece.estimate is not None:
                self._estimates.setdefault((index, piece.sample_index), piece.estimate)
        self._pieces.append((index, piece))
        self._news.set()

    def _finish(self, index: int, future: Future[Completion]) -> None:
        if index in self._open:
            counted = self._open.pop(index)
            self._backend.end(counted)
            completion = future.result()
            has_failed = completion.finish_reason in _FAILED
            if not (counted.has_begun or has_failed):  # it has no tokens, as one that pools
                self._backend.metrics.prompted(len(completion.prompt_token_ids))
            self._backend.metrics.ended(completion, self.jobs[index].params)
            for i, sample in enumerate(completion.samples):
                self._backend.metrics.predicted(self._estimates.get((index, i)), sample)
            self._trace.ended(completion)
            self._num_prompt += len(completion.prompt_token_ids)
            self._num_output += sum(len(sample.token_ids) for sample in completion.samples)
            note(self._notes, prompt_tokens=self._num_prompt, completion_tokens=self._num_output)
        self._news.set()

    def _note_gap(self, index: int, piece: Piece) -> None:
        """Measure the time between tokens: the time of a piece divided by its tokens."""
        now_s, key = time.monotonic(), (index, piece.sample_index)
        if key in self._last_s:
            self._backend.metrics.between_tokens(now_s - self._last_s[key], len(piece.token_ids))
        self._last_s[key] = now_s

    def _expire(self) -> None:
        self._has_expired = True
        self._news.set()

    def _ping(self) -> None:
        self._is_silent = True
        self._news.set()
        if not self._is_closed:
            self._next_ping = asyncio.get_running_loop().call_later(PING_S, self._ping)

    def _check_time(self) -> None:
        if self._has_expired and self._open:
            assert self._timeout_s is not None
            raise timed_out(self._timeout_s)

    def _results(self) -> list[Completion]:
        completions = [pending.future.result() for pending in self._pending]
        for completion in completions:
            if completion.error is not None:
                self._backend.fail_if_over(completion.error)
                raise completion.error
            if any(sample.finish_reason == "cancelled" for sample in completion.samples):
                raise RuntimeClosedError("the server was stopped before the answer was complete")
        return completions


def merged(pieces: Sequence[tuple[int, Piece]]) -> Group:
    """Return one merged piece per sample; ends that are errors are raised instead."""
    pieces = [each for each in pieces if each[1].finish_reason not in _FAILED]
    if len(pieces) < 2:
        return pieces
    found: dict[tuple[int, int], Piece] = {}
    for index, piece in pieces:
        key = (index, piece.sample_index)
        found[key] = _joined(found[key], piece) if key in found else piece
    return [(index, piece) for (index, _), piece in found.items()]


def _joined(first: Piece, second: Piece) -> Piece:
    return replace(
        second,
        text=first.text + second.text,
        reasoning=first.reasoning + second.reasoning,
        num_reasoning=first.num_reasoning + second.num_reasoning,
        token_ids=first.token_ids + second.token_ids,
        logprobs=None if second.logprobs is None else (first.logprobs or ()) + second.logprobs,
        estimate=second.estimate or first.estimate,
    )
