"""The protocol between conversations and what answers their turns."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from typing import TYPE_CHECKING, Protocol

from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.engine.answers import Piece, PieceSink


class TurnClient(Protocol):
    """Answers the prompts of conversations."""

    @property
    def max_prompt_tokens(self) -> int:
        """Length of the longest prompt that leaves room for one output token."""
        ...

    def answer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> Completion:
        """Wait for the completion, and return it; with its error if the request fails.

        When this raises, KeyboardInterrupt included, the request has ended.

        Raises:
          InvalidRequestError: one of its subclasses.
          TurnTimeoutError: the request had not ended after `timeout_s` seconds.
        """
        ...

    async def aanswer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
        on_piece: PieceSink | None = None,
    ) -> Completion:
        """`answer` for asyncio. Cancelling the task ends the request.

        Args:
          on_piece: called with the pieces that `stream` yields, on another thread; it must not
            wait.
        """
        ...

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> Generator[Piece]:
        """Yield the completion piece by piece. Closing the generator cancels the request.

        Raises:
          InvalidRequestError: one of its subclasses.
          TimeoutError: the last piece had not come after `timeout_s` seconds.
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
