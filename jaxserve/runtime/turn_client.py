"""A client that submits the turns of conversations as requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from functools import partial
from typing import final

from jaxserve.core.errors import TurnTimeoutError
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece, PieceSink
from jaxserve.engine.pending import Pending, Start, aread, read, submitted, wait


@final
class ServiceTurnClient:
    """A `conversations.TurnClient` over the `submit` of a `Service`.

    `check_may_wait` raises InvalidRequestError on a thread that must not wait for answers.
    """

    def __init__(
        self,
        submit: Callable[..., Pending],
        *,
        check_may_wait: Callable[[], None],
        max_prompt_tokens: Callable[[], int],
        progress: bool,
    ):
        self._submit = submit
        self._check_may_wait = check_may_wait
        self._max_prompt_tokens = max_prompt_tokens
        self._progress = progress

    @property
    def max_prompt_tokens(self) -> int:
        return self._max_prompt_tokens()

    def answer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> Completion:
        self._check_may_wait()
        pending = self._submit(prompt, params, conversation_id=conversation_id)
        try:
            wait([pending], progress=self._progress, timeout_s=timeout_s)
        except BaseException as error:
            pending.cancel()
            completion = pending.result()
            if not isinstance(error, TimeoutError):
                raise
            raise _timed_out(conversation_id, timeout_s, completion) from None
        return pending.result()

    async def aanswer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
        on_piece: PieceSink | None = None,
    ) -> Completion:
        submit = partial(self._submit, prompt, params, conversation_id=conversation_id)
        (pending,) = await submitted(lambda: [submit(on_piece=on_piece)], [params])
        try:
            async with asyncio.timeout(timeout_s):
                return await pending.aresult()
        except BaseException as error:
            pending.cancel()
            completion = await pending.aresult()
            if not isinstance(error, TimeoutError):
                raise
            raise _timed_out(conversation_id, timeout_s, completion) from None

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> Generator[Piece]:
        self._check_may_wait()
        return read(self._start(prompt, params, conversation_id), params.n, timeout_s)

    def astream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> AsyncGenerator[Piece]:
        return aread(self._start(prompt, params, conversation_id), params, timeout_s)

    def _start(self, prompt: Sequence[int], params: SamplingParams, conversation_id: str) -> Start:
        return lambda sink: self._submit(
            prompt, params, conversation_id=conversation_id, on_piece=sink
        )


def _timed_out(
    conversation_id: str, timeout_s: float | None, completion: Completion
) -> TurnTimeoutError:
    return TurnTimeoutError(conversation_id, timeout_s, len(completion.token_ids))
