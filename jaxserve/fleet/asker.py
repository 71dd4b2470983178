"""Turns of conversations, answered by a fleet."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import final

from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece
from jaxserve.runtime.pending import Pending
from jaxserve.runtime.streams import Start, aread, read
from jaxserve.runtime.turns import aturn_answer, turn_answer


@final
class FleetAsker:
    """See `conversations.Asker`.

    Args:
      submit: the fleet's.
      max_prompt_tokens: of the replicas.
      progress: show a bar while `answer` waits.
    """

    def __init__(self, submit: Callable[..., Pending], *, max_prompt_tokens: int, progress: bool):
        self._submit = submit
        self._max_prompt_tokens = max_prompt_tokens
        self._progress = progress

    @property
    def max_prompt_tokens(self) -> int:
        return self._max_prompt_tokens

    def answer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> Completion:
        pending = self._submit(prompt, params, conversation_id=conversation_id)
        return turn_answer(pending, conversation_id, timeout_s, progress=self._progress)

    async def aanswer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> Completion:
        pending = self._submit(prompt, params, conversation_id=conversation_id)
        return await aturn_answer(pending, conversation_id, timeout_s)

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> Generator[Piece]:
        return read(self._start(prompt, params, conversation_id), params.n, timeout_s)

    def astream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> AsyncGenerator[Piece]:
        return aread(self._start(prompt, params, conversation_id), params.n, timeout_s)

    def _start(self, prompt: Sequence[int], params: SamplingParams, conversation_id: str) -> Start:
        return lambda sink: self._submit(
            prompt, params, conversation_id=conversation_id, on_piece=sink
        )
