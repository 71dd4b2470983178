"""Conversations as a workload: every turn follows the answer before it (Pensieve, 3.6.1)."""

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
from jaxserve.workload.item import WorkloadItem


class FollowUp(Protocol):
    """What a closed workload asks next."""

    def __call__(self, index: int, completion: Completion, ended_s: float) -> WorkloadItem | None:
        """The request that follows an answer; None for none.

        Args:
          index: of the answered request: the workload's items come first, then what followed, in
            the order in which it was returned.
          ended_s: when the answer ended, in seconds from the start of the run, as arrivals are.
        """
        ...


@final
@dataclass(frozen=True, kw_only=True)
class Turn:
    """What somebody says, and how long the answer shall be.

    Attributes:
      token_ids: of what is said, without what came before it.
      reaction_s: how long they take to say it after the answer before.
    """

    token_ids: tuple[int, ...]
    num_output_tokens: int
    reaction_s: float = 0.0


@final
@dataclass(frozen=True, kw_only=True)
class Talk:
    """One conversation; it begins at `arrival_s`, in seconds from the start of the run."""

    turns: tuple[Turn, ...]
    arrival_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Of all turns and answers."""
        return sum(len(turn.token_ids) + turn.num_output_tokens for turn in self.turns)


@final
class Talks:
    """Conversations for whoever plays a workload: the first turns, and what follows each answer.

    Clients are stateless: every request's prompt is its whole history. For one run: it remembers
    who asked what.

    Args:
      max_tokens: the most that a policy knows of an answer's length; the context's end if None.
    """

    def __init__(self, talks: Sequence[Talk], *, max_tokens: int | None = None):
        self._max_tokens = max_tokens
        self._places = [(talk, 0) for talk in talks]
        self.items = [
            self._ask(talk.turns[0], talk.turns[0].token_ids, talk.arrival_s) for talk in talks
        ]

    def follow_up(self, index: int, completion: Completion, ended_s: float) -> WorkloadItem | None:
        """As `FollowUp`; a conversation whose answer failed is over."""
        talk, number = self._places[index]
        if completion.error is not None or number + 1 == len(talk.turns):
            return None
        turn = talk.turns[number + 1]
        history = completion.prompt_token_ids + completion.token_ids
        self._places.append((talk, number + 1))
        return self._ask(turn, history + turn.token_ids, ended_s + turn.reaction_s)

    def _ask(self, turn: Turn, prompt: tuple[int, ...], arrival_s: float) -> WorkloadItem:
        return WorkloadItem(
            prompt_token_ids=prompt,
            num_output_tokens=turn.num_output_tokens,
            max_tokens=self._max_tokens,
            arrival_s=arrival_s,
        )


def sample(
    num: int,
    seed: int,
    *,
    tokenizer: sharegpt.Encoder,
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
    """`num` conversations of ShareGPT drawn without replacement, their turns in order.

    Args:
      num: how many to draw.
      seed: of the draw, the arrivals and the reactions.
      tokenizer: counts the tokens of questions and answers.
      max_context: longer conversations are passed over, as in the thesis.
      min_rounds: so are those with fewer questions.
      scale: multiplies the lengths of questions, which lose their ends, and of answers.
      reaction_s: mean of the exponential distribution of the time that people take to go on.
      rate: conversations that begin a second, a Poisson process; all at once if None.
      whole: put records together that one long conversation was cut into, at 2,048 tokens each.
      accepts: whether a conversation, by its `origin`, may be drawn.
      path: a ShareGPT file; the published one is fetched where None.
      progress: show a bar while downloading.

    Raises:
      InvalidConfigError: the file holds fewer than `num` such conversations, or a number is out of
        range.
      DownloadError, ModelCacheError: the file cannot be fetched.
    """
    for name, value in (("scale", scale), ("reaction_s", reaction_s), ("rate", rate)):
        if value is not None and not 0 < value < math.inf:
            raise InvalidConfigError(f"{name}={value}; give a number above 0")
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
        texts = [(tokenizer.encode(asked), tokenizer.encode(said)) for asked, said in rounds]
        if not all(asked and said for asked, said in texts):
            continue
        talk = Talk(
            turns=tuple(
                Turn(
                    token_ids=tuple(asked[: math.ceil(scale * len(asked))]),
                    num_output_tokens=math.ceil(scale * len(said)),
                    reaction_s=float(reaction_s * numbers.standard_exponential()),
                )
                for asked, said in texts
            ),
            arrival_s=arrival_s,
        )
        if talk.num_tokens <= max_context:
            talks.append(talk)
            gap = float(numbers.standard_exponential())
            arrival_s += 0.0 if rate is None else gap / rate
    if len(talks) < num:
        raise InvalidConfigError(
            f"{num} conversations were asked for, and there are {len(talks)} of {min_rounds} or "
            f"more rounds within {max_context} tokens; ask for fewer, or allow longer ones"
        )
    return talks
