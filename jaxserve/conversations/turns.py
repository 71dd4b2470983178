"""Turns and histories of conversations, in tokens and in messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, final

Message = dict[str, Any]


@final
@dataclass(frozen=True, kw_only=True)
class Turn:
    """One prompt and its answer.

    Attributes:
      num_kept: leading tokens of the history that the prompt kept: all, unless the history was
        tokenized again.
      prompt: token ids of the prompt after those.
      answer: token ids; in a chat, those of the text, and the model's end token if that ended it.
      messages: the new messages, in the first turn with those that began the conversation; None if
        the turn is token ids.
      text: the answer, without what the model thought.
      finish_reason: "stop" or "length".
      finished_s: seconds since 1970.
      reasoning: what the model thought; "" if it did not think.
    """

    num_kept: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    messages: tuple[Message, ...] | None
    text: str
    finish_reason: str
    finished_s: float
    reasoning: str = ""

    @property
    def reply(self) -> Message:
        """The answer as a message of the history."""
        thought = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.text, **thought}


@final
@dataclass(frozen=True)
class History:
    """The tokens of all ended turns. Immutable."""

    turns: tuple[Turn, ...] = ()
    token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> Self:
        token_ids: list[int] = []
        for turn in turns:
            del token_ids[turn.num_kept :]
            token_ids += (*turn.prompt, *turn.answer)
        return cls(tuple(turns), tuple(token_ids))

    def extended(self, turn: Turn) -> History:
        token_ids = (*self.token_ids[: turn.num_kept], *turn.prompt, *turn.answer)
        return History((*self.turns, turn), token_ids)

    @property
    def is_chat(self) -> bool:
        """Whether the turns are messages; otherwise they are token ids."""
        return all(turn.messages is not None for turn in self.turns)

    @property
    def asked(self) -> list[Message]:
        return self.messages[:-1]

    @property
    def messages(self) -> list[Message]:
        """All messages; only the answers if the turns are token ids."""
        return [
            dict(message) for turn in self.turns for message in (*(turn.messages or ()), turn.reply)
        ]
