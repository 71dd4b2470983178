"""Turns of conversations, answered by a fleet."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece
from jaxserve.runtime.pending import Pending
from jaxserve.runtime.turns import aturn_answer, turn_answer

# Prompt, parameters, id of the conversation.
Submit = Callable[[Sequence[int], SamplingParams, str], Pending]


@final
class FleetAsker:
    """See `conversations.Asker`. Does not stream, as fleets do not.

    Args:
      max_prompt_tokens: of the replicas.
      progress: show a bar while `answer` waits.
    """

    def __init__(self, submit: Submit, *, max_prompt_tokens: int, progress: bool):
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
        pending = self._submit(prompt, params, conversation_id)
        return turn_answer(pending, conversation_id, timeout_s, progress=self._progress)

    async def aanswer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> Completion:
        pending = self._submit(prompt, params, conversation_id)
        return await aturn_answer(pending, conversation_id, timeout_s)

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> Generator[Piece]:
        raise _does_not_stream()

    def astream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> AsyncGenerator[Piece]:
        raise _does_not_stream()


def _does_not_stream() -> InvalidConfigError:
    return InvalidConfigError(
        "a fleet does not stream; use send or asend, or a Runtime with replicas in one process "
        "(mesh=make_mesh(data=...))"
    )
