"""A turn of a conversation that the service keeps, as the answer to an HTTP request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, final

from anyio import to_thread

from jaxserve.conversations import Conversation
from jaxserve.core.errors import JaxserveError, TurnCancelledError
from jaxserve.core.request import Completion, Sample, Timing
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece, failed_completion
from jaxserve.scheduling.lengths import LengthEstimate
from jaxserve.server.backend import Backend, CountedRequest
from jaxserve.server.errors import invalid
from jaxserve.server.exchange import PING_S, STATUS_S, Group, merged
from jaxserve.server.guard import note, notes_here
from jaxserve.server.tools import Tools
from jaxserve.server.tracing import trace_here


@final
class TurnExchange:
    """The next turn of a conversation. Use it on the event loop.

    `said` are the new messages; the service has the earlier ones. `instructions` are the system
    message of a new conversation; None keeps the existing one.
    """

    def __init__(
        self,
        backend: Backend,
        conversation_id: str,
        said: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        tools: Tools,
        *,
        instructions: str | None = None,
    ):
        self._backend = backend
        self._id = conversation_id
        self._said = tools.as_said(said)
        self._instructions = instructions
        self._render = tools if tools.is_given or tools.variables else None
        self._params = params
        self._notes = notes_here()
        self._trace = trace_here()
        self._trace.asked(params, conversation_id)
        self._conversation: Conversation | None = None
        self._begun_s = time.monotonic()
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._estimate: LengthEstimate | None = None
        self._num_tokens = 0
        self._has_prompted = self._has_ended = self._is_closed = False

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the last turn's prompt, the history included; known at the end."""
        assert self._conversation is not None
        turn = self._conversation.turns[-1]
        return len(self._conversation.token_ids) - len(turn.answer)

    async def completion(self) -> Completion:
        """Return the answer, which is then kept. Cancelling the task cancels the turn."""
        conversation, open_ = await self._open()
        mailbox = self._backend.mailbox
        assert mailbox is not None
        try:
            completion = await conversation.asend(
                self._said,
                self._params,
                timeout_s=self._backend.options.request_timeout_s,
                max_prompt_tokens=self._backend.options.max_prompt_tokens,
                render=self._render,
                on_piece=lambda piece: mailbox.post(partial(self._take, open_, piece)),
            )
            self._ended(open_, completion)
        except JaxserveError as error:
            self._failed(error)
            raise
        finally:
            self._close(open_)
        return completion

    async def pieces(self) -> AsyncGenerator[Group]:
        """Yield the pieces of the answer; the last one when the turn is kept."""
        conversation, open_ = await self._open()
        tokens: list[int] = []
        try:
            pieces = conversation.astream(
                self._said,
                self._params,
                timeout_s=self._backend.options.request_timeout_s,
                max_prompt_tokens=self._backend.options.max_prompt_tokens,
                render=self._render,
            )
            try:
                async for piece in pieces:
                    self._take(open_, piece)
                    tokens += piece.token_ids
                    if piece.finish_reason is not None:
                        self._ended(open_, self._as_completion(tokens, piece))
                    yield [(0, piece)]
            except JaxserveError as error:
                self._failed(error)
                self._backend.fail_if_over(error)
                raise
            finally:
                await pieces.aclose()
        finally:
            self._close(open_)

    async def _open(self) -> tuple[Conversation, CountedRequest]:
        service = self._backend.ready_service()
        await self._backend.check_room(1)
        open_ = self._backend.begin()
        try:
            conversation = await to_thread.run_sync(service.conversation, self._id)
            self._instruct(conversation)
        except JaxserveError as error:
            self._failed(error)
            self._close(open_)
            raise
        except BaseException:
            self._close(open_)
            raise
        self._conversation = conversation
        return conversation, open_

    def _instruct(self, conversation: Conversation) -> None:
        """Begin a new conversation with the instructions; an older one has them already."""
        if self._instructions is None:
            return
        first, history = {"role": "system", "content": self._instructions}, conversation.history
        if not history:
            self._said = [first, *self._said]
        elif history[0] != first:
            raise invalid(
                f"the conversation {self._id!r} began with other instructions, or without; send "
                "those that it began with, leave instructions out, or begin another conversation",
                "instructions",
            )

    def _take(self, open_: CountedRequest, piece: Piece) -> None:
        """Count arrived tokens, and keep the first estimate of the answer's length."""
        if self._is_closed or not piece.token_ids:
            return
        now_s = time.monotonic()
        if self._last_s is None:
            self._first_s = now_s
            self._backend.has_token(open_)
            assert self._conversation is not None
            self._prompted(self._conversation.num_asked)
        else:
            self._backend.metrics.between_tokens(now_s - self._last_s, len(piece.token_ids))
        self._last_s = now_s
        self._count(len(piece.token_ids))
        self._estimate = self._estimate or piece.estimate

    def _prompted(self, num_tokens: int) -> None:
        """Count the prompt once: with the first token, or at the end of a turn that is kept."""
        if num_tokens and not self._has_prompted:
            self._has_prompted = True
            self._backend.metrics.prompted(num_tokens)

    def _count(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        self._backend.metrics.generated(num_tokens)

    def _as_completion(self, tokens: Sequence[int], last: Piece) -> Completion:
        """Return the parts of a streamed turn that metrics count, with the server's times."""
        assert last.finish_reason is not None
        return Completion(
            request_id="",
            prompt_token_ids=(0,) * self.num_prompt_tokens,
            samples=(Sample(text="", token_ids=tuple(tokens), finish_reason=last.finish_reason),),
            timing=Timing(
                arrival_s=self._begun_s,
                admitted_s=self._begun_s,
                first_token_s=self._first_s or self._begun_s,
                finished_s=time.monotonic(),
            ),
        )

    def _ended(self, open_: CountedRequest, completion: Completion) -> None:
        self._backend.has_token(open_)
        self._count(len(completion.token_ids) - self._num_tokens)
        self._prompted(len(completion.prompt_token_ids))
        self._backend.metrics.ended(completion, self._params)
        self._backend.metrics.predicted(self._estimate, completion.samples[0])
        self._trace.ended(completion)
        note(
            self._notes,
            conversation_id=self._id,
            prompt_tokens=len(completion.prompt_token_ids),
            completion_tokens=len(completion.token_ids),
        )
        self._has_ended = True

    def _failed(self, error: JaxserveError) -> None:
        """Count a turn that has failed; a refused turn does not count."""
        if isinstance(error, TurnCancelledError):  # `_close` counts it
            return
        timing = Timing(arrival_s=self._begun_s, first_token_s=self._first_s)
        self._backend.metrics.ended(failed_completion("", (), error, timing), self._params)
        self._has_ended = True

    def _close(self, open_: CountedRequest) -> None:
        self._is_closed = True
        self._backend.end(open_)
        if not self._has_ended:
            self._backend.metrics.aborted()


@final
class Relay:
    """Reads groups of pieces on a task of its own, as `Exchange` does for other requests.

    `groups` are read to their end, or closed by `close`. After `status_s` (at the beginning) or
    `ping_s` (later) seconds without a piece, an empty group is yielded.
    """

    def __init__(
        self, groups: AsyncGenerator[Group], status_s: float = STATUS_S, ping_s: float = PING_S
    ):
        self._ping_s = ping_s
        self._is_silent = False
        self._next_ping = asyncio.get_running_loop().call_later(status_s, self._ping)
        self._pieces: Group = []
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._is_over = False
        self._task = asyncio.ensure_future(self._read(groups))

    async def groups(self) -> AsyncGenerator[Group]:
        """Yield the pieces that have arrived, until the end; see `Exchange.stream`."""
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                taken, self._pieces = self._pieces, []
                if taken or (self._is_silent and not self._is_over):
                    yield merged(taken)
                self._is_silent = False
                if self._is_over and not self._pieces:
                    break
            if self._error is not None:
                raise self._error
        finally:
            self.close()

    def close(self) -> None:
        """Cancel the turn if it has not ended. Call it when the client has gone."""
        self._next_ping.cancel()
        self._task.cancel()

    def _ping(self) -> None:
        self._is_silent = True
        self._news.set()
        self._next_ping = asyncio.get_running_loop().call_later(self._ping_s, self._ping)

    async def _read(self, groups: AsyncGenerator[Group]) -> None:
        try:
            async with aclosing(groups):
                async for group in groups:
                    self._pieces += group
                    self._news.set()
        except Exception as error:
            self._error = error
        finally:
            self._is_over = True
            self._news.set()
