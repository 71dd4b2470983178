"""Conversations as a workload: every turn follows the previous answer (Pensieve, 3.6.1)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

import numpy as np

from jaxserve.core.assets import fetch
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.request import Completion
from jaxserve.workload import sharegpt
from jaxserve.workload.answers import turns
from jaxserve.workload.items import WorkloadItem


class FollowUp(Protocol):
    """A function that returns the next request of a closed workload."""

    def __call__(self, index: int, completion: Completion, ended_s: float) -> WorkloadItem | None:
        """Return the request that follows an answer, if there is one.

        Args:
          index: index of the answered request: first the workload's items, then the follow-ups in
            the order in which this function returned them.
          ended_s: end of the answer, in seconds from the start of the run.
        """
        ...


@final
@dataclass(frozen=True, kw_only=True)
class UserTurn:
    """A user's message and the length of its answer.

    Attributes:
      token_ids: tokens of the message, without its history.
      reaction_s: seconds from the end of the previous answer to the message.
    """

    token_ids: tuple[int, ...]
    num_output_tokens: int
    reaction_s: float = 0.0


@final
@dataclass(frozen=True, kw_only=True)
class Talk:
    """A conversation that begins `arrival_s` seconds after the start of the run."""

    turns: tuple[UserTurn, ...]
    arrival_s: float = 0.0
    conversation_id: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.token_ids) + turn.num_output_tokens for turn in self.turns)


@final
class Talks:
    """A closed workload of conversations: their first turns, and the turn after each answer.

    The prompt of every request is its whole history. An object keeps the state of the
    conversations, so it serves one run.

    Args:
      max_tokens: `max_tokens` of every request, which a policy knows; None for the context's end.
    """

    def __init__(self, talks: Sequence[Talk], *, max_tokens: int | None = None):
        self._max_tokens = max_tokens
        self._places = [(talk, 0) for talk in talks]
        self.items = [
            self._ask(talk, talk.turns[0], talk.turns[0].token_ids, talk.arrival_s)
            for talk in talks
        ]

    def follow_up(self, index: int, completion: Completion, ended_s: float) -> WorkloadItem | None:
        """Return a conversation's next turn; it ends when an answer fails."""
        talk, number = self._places[index]
        if completion.error is not None or number + 1 == len(talk.turns):
            return None
        turn = talk.turns[number + 1]
        history = completion.prompt_token_ids + completion.token_ids
        self._places.append((talk, number + 1))
        return self._ask(talk, turn, history + turn.token_ids, ended_s + turn.reaction_s)

    def _ask(
        self, talk: Talk, turn: UserTurn, prompt: tuple[int, ...], arrival_s: float
    ) -> WorkloadItem:
        return WorkloadItem(
            prompt_token_ids=prompt,
            num_output_tokens=turn.num_output_tokens,
            max_tokens=self._max_tokens,
            arrival_s=arrival_s,
            conversation_id=talk.conversation_id,
        )


def sample(
    num: int,
    seed: int,
    *,
    tokenizer: sharegpt.TextEncoder,
    max_context: int,
    min_rounds: int = 1,
    scale: float = 1.0,
    reaction_s: float = 60.0,
    rate: float | None = None,
    whole: bool = False,
    accepts: Callable[[str], bool] = lambda _: True,
    path: Path | None = None,
    progress: bool = True,
) -> list[Talk]:
    """Draw `num` conversations of ShareGPT without replacement.

    Args:
      num: number of conversations.
      seed: seed of the draw, the arrivals and the reaction times.
      tokenizer: counts the tokens of questions and answers.
      max_context: conversations with more tokens are skipped, as in the thesis.
      min_rounds: conversations with fewer questions are skipped.
      scale: multiplies the lengths of questions, which are cut at the end, and of answers.
      reaction_s: mean of the reaction times, which are exponentially distributed.
      rate: conversations that begin per second, a Poisson process; None for all at once.
      whole: join the records that one long conversation was cut into, at 2,048 tokens each.
      accepts: returns whether a conversation may be drawn, by its `origin`.
      path: a ShareGPT file; None to fetch the published one.
      progress: show a bar during the download.

    Raises:
      InvalidConfigError: the file has fewer than `num` such conversations, or a number is out of
        range.
      DownloadError, ModelCacheError: the file cannot be fetched.
    """
    for name, value in (("scale", scale), ("reaction_s", reaction_s), ("rate", rate)):
        if value is not None and not 0 < value < math.inf:
            raise InvalidConfigError(f"{name}={value} is not allowed; pass a number above 0")
    records = sharegpt.read(path or fetch(sharegpt.FILE, progress=progress))
    found = [
        rounds
        for talk in (sharegpt.whole(records) if whole else records)
        if accepts(talk.origin) and len(rounds := list(turns(talk))) >= max(1, min_rounds)
    ]
    random.Random(seed).shuffle(found)
    numbers = np.random.default_rng(seed)
    talks: list[Talk] = []
    arrival_s = 0.0
    for rounds in found:
        if len(talks) == num:
            break
        tokens = [
            (tokenizer.encode(question), tokenizer.encode(answer)) for question, answer in rounds
        ]
        if not all(question and answer for question, answer in tokens):
            continue
        talk = Talk(
            turns=tuple(
                UserTurn(
                    token_ids=tuple(question[: math.ceil(scale * len(question))]),
                    num_output_tokens=math.ceil(scale * len(answer)),
                    reaction_s=float(reaction_s * numbers.standard_exponential()),
                )
                for question, answer in tokens
            ),
            arrival_s=arrival_s,
        )
        if talk.num_tokens <= max_context:
            talks.append(talk)
            gap = float(numbers.standard_exponential())
            arrival_s += 0.0 if rate is None else gap / rate
    if len(talks) < num:
        raise InvalidConfigError(
            f"num={num} is more than the {len(talks)} conversations of {min_rounds} or more rounds "
            f"within {max_context} tokens; pass a smaller num, or raise max_context"
        )
    return talks
