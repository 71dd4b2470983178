"""What conversations need to be answered."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from typing import TYPE_CHECKING, Protocol

from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.engine.answers import Piece


class TurnClient(Protocol):
    """Who answers prompts: a runtime."""

    @property
    def max_prompt_tokens(self) -> int:
        """Of a prompt that leaves room for one output token."""
        ...

    def answer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> Completion:
        """The answer. When an exception leaves it, Ctrl-C's for one, the request has ended.

        Raises:
          InvalidRequestError, TurnTimeoutError
        """
        ...

    async def aanswer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> Completion:
        """`answer` for asyncio; cancelling the task ends the request."""
        ...

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> Generator[Piece]:
        """The answer piece by piece; closing the generator cancels it.

        Raises:
          InvalidRequestError
          TimeoutError: the last piece was not there in time.
        """
        ...

    def astream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> AsyncGenerator[Piece]:
        """`stream` for asyncio."""
        ...
