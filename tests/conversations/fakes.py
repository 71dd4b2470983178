"""A turn client without a model, and connections of journals."""

from __future__ import annotations

import asyncio
import sqlite3
import zlib
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxserve.conversations import Conversations, Journal
from jaxserve.conversations.journal import Connect
from jaxserve.core.options import JournalLimits
from jaxserve.core.request import Completion, FinishReason, Sample, Timing
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece, PieceSink

if TYPE_CHECKING:
    from jaxserve.models.tokenizer import Tokenizer

VOCAB_SIZE = 97
END_ID = VOCAB_SIZE - 1


@dataclass
class FakeTurnClient:
    """A turn client whose answer is a deterministic function of the whole prompt.

    Attributes:
      finish_reason: finish reason of every answer; "stop" puts the end token last.
      during: function that is called in the middle of every answer.
      prompts: the prompts so far.
    """

    tokenizer: Tokenizer | None = None
    finish_reason: FinishReason = "length"
    max_prompt_tokens: int = 10_000
    during: Callable[[], None] = lambda: None
    prompts: list[tuple[int, ...]] = field(default_factory=list)

    def answer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> Completion:
        self.prompts.append(tuple(prompt))
        self.during()
        token_ids = self._token_ids(prompt)
        sample = Sample(
            text=self._text(token_ids), token_ids=token_ids, finish_reason=self.finish_reason
        )
        return Completion(
            request_id=conversation_id,
            prompt_token_ids=tuple(prompt),
            samples=(sample,),
            timing=Timing(arrival_s=0.0),
        )

    async def aanswer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
        on_piece: PieceSink | None = None,
    ) -> Completion:
        await asyncio.sleep(0)
        return self.answer(prompt, params, conversation_id=conversation_id, timeout_s=timeout_s)

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> Generator[Piece]:
        sample = self.answer(prompt, params, conversation_id=conversation_id, timeout_s=timeout_s)
        half = len(sample.token_ids) // 2
        first, rest = sample.token_ids[:half], sample.token_ids[half:]
        yield Piece(text=self._text(first), token_ids=first)
        yield Piece(text=self._text(rest), token_ids=rest, finish_reason=self.finish_reason)

    async def astream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        conversation_id: str,
        timeout_s: float | None,
    ) -> AsyncGenerator[Piece]:
        for piece in self.stream(
            prompt, params, conversation_id=conversation_id, timeout_s=timeout_s
        ):
            await asyncio.sleep(0)
            yield piece

    def _token_ids(self, prompt: Sequence[int]) -> tuple[int, ...]:
        seed = zlib.crc32(repr(tuple(prompt)).encode())
        letters = tuple(1 + (seed >> shift) % 90 for shift in range(6))
        return (*letters, END_ID) if self.finish_reason == "stop" else letters

    def _text(self, token_ids: Sequence[int]) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(token_ids)


class Connections:
    """An opener of SQLite connections for journals, which stores them.

    Args:
      settings: settings that replace the journal's, such as `timeout`.
    """

    def __init__(self, **settings: Any):
        self.all: list[sqlite3.Connection] = []
        self._settings = settings

    def __call__(self, where: str, **settings: Any) -> sqlite3.Connection:
        self.all.append(sqlite3.connect(where, **{**settings, **self._settings}))
        return self.all[-1]

    @property
    def last(self) -> sqlite3.Connection:
        return self.all[-1]


def conversations(
    path: str | None = None,
    *,
    client: FakeTurnClient | None = None,
    tokenizer: Tokenizer | None = None,
    limits: JournalLimits | None = None,
    connect: Connect = sqlite3.connect,
) -> Conversations:
    """Return the conversations of a fake runtime with a real journal."""
    journal = Journal(path, limits or JournalLimits(), connect=connect)
    return Conversations(journal, client or FakeTurnClient(tokenizer), tokenizer, VOCAB_SIZE)
