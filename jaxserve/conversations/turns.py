"""What was said, in tokens and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, final

Message = dict[str, Any]


@final
@dataclass(frozen=True, kw_only=True)
class Turn:
    """One question and its answer.

    Attributes:
      num_kept: leading tokens of the history that the prompt kept: all of them, unless the history
        had to be tokenized anew.
      prompt: token ids that the prompt had after those.
      answer: token ids, with the stop token that ended it.
      messages: that were new to the model, in the first turn with those that began the
        conversation; None where token ids were given.
      text: the answer's.
      finish_reason: "stop" or "length".
      finished_s: seconds since 1970.
    """

    num_kept: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    messages: tuple[Message, ...] | None
    text: str
    finish_reason: str
    finished_s: float

    @property
    def reply(self) -> Message:
        """The answer as a message."""
        return {"role": "assistant", "content": self.text}


@final
@dataclass(frozen=True)
class History:
    """Turns that have ended, and the tokens that they come to. Immutable."""

    turns: tuple[Turn, ...] = ()
    token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> Self:
        """Of turns in their order."""
        token_ids: list[int] = []
        for turn in turns:
            del token_ids[turn.num_kept :]
            token_ids += (*turn.prompt, *turn.answer)
        return cls(tuple(turns), tuple(token_ids))

    def extended(self, turn: Turn) -> History:
        """With one turn more."""
        token_ids = (*self.token_ids[: turn.num_kept], *turn.prompt, *turn.answer)
        return History((*self.turns, turn), token_ids)

    @property
    def is_chat(self) -> bool:
        """Whether it is of messages; of token ids otherwise."""
        return all(turn.messages is not None for turn in self.turns)

    @property
    def asked(self) -> list[Message]:
        """The messages up to the last answer, which is left out."""
        return self.messages[:-1]

    @property
    def messages(self) -> list[Message]:
        """All messages; of turns of token ids, the answers alone."""
        return [
            dict(message) for turn in self.turns for message in (*(turn.messages or ()), turn.reply)
        ]
