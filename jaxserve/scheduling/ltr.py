"""Learning to rank: answers that are predicted to be short go first, and starving ones in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.policy import QueueView, ServiceOrder
from jaxserve.scheduling.sequence import Phase, Sequence


@final
@dataclass(frozen=True)
class LearningToRank(ServiceOrder):
    """vLLM-LTR (Fu et al., arXiv:2408.15792, algorithm 1): by predicted rank, with preemption.

    A sequence's score is given once, before its first token, and only the order of scores counts.
    Those of running sequences count too, so that a waiting one preempts those of higher scores
    (`Unified(preempts=True)`). What had no token in `starves` iterations has priority over all
    others, until it has had `period` tokens: a chunk of a prompt is no token, or prompts of more
    chunks would be computed again and again. These numbers are from the authors' scripts.

    Assumed: the score is the mean of our predictor's distribution, where theirs comes from a model
    of 125M parameters that was trained on ranks alone; without an estimate it is the limit of the
    length. A decode loop counts as many iterations as it has.
    """

    starves: int = 200
    period: int = 10

    def new_state(self) -> Ranks:
        return Ranks(self)


@final
@dataclass(eq=False, slots=True)
class _Turn:
    """What a sequence had at the last update.

    Attributes:
      num_idle: iterations since its last token.
      num_left: tokens that it gets with priority.
    """

    num_outputs: int = 0
    num_computed: int = 0
    num_idle: int = 0
    num_left: int = 0


@final
class Ranks:
    """What each sequence of one scheduler had, and which have waited too long."""

    def __init__(self, how: LearningToRank):
        self._starves, self._period = how.starves, how.period
        self._turns: dict[Sequence, _Turn] = {}

    def key(self, sequence: Sequence, lengths: LengthTracker) -> tuple[bool, float, float, int]:
        turn = self._turns.setdefault(sequence, _Turn())
        estimate = lengths.first_estimate(sequence)
        score = float(sequence.max_length - sequence.prompt_length)
        if estimate is not None:
            score = min(estimate.expected_length, score)
        return turn.num_left <= 0, score, sequence.request.arrival_s, sequence.key

    def update(self, queue: QueueView) -> bool:
        for sequence in [each for each in self._turns if each.phase is Phase.FINISHED]:
            del self._turns[sequence]
        had = {each: self._had(each, turn) for each, turn in self._turns.items()}
        num_iterations = max((num for num, _ in had.values()), default=0)
        has_changed = False
        for sequence, turn in self._turns.items():
            had_priority = turn.num_left > 0
            num_own, num_tokens = had[sequence]
            if num_own:
                turn.num_idle = 0
                turn.num_left -= min(num_tokens, turn.num_left)
            else:
                turn.num_idle += num_iterations
            if turn.num_idle >= self._starves:
                turn.num_idle, turn.num_left = 0, self._period
            has_changed = has_changed or had_priority != (turn.num_left > 0)
        return has_changed

    def _had(self, sequence: Sequence, turn: _Turn) -> tuple[int, int]:
        """Return the iterations of the last step in which a sequence took part, and its tokens."""
        outputs, computed = sequence.num_planned_outputs, sequence.kv.num_computed
        num_tokens = max(0, outputs - turn.num_outputs)
        num = max(num_tokens, int(computed > turn.num_computed))
        turn.num_outputs, turn.num_computed = outputs, computed
        return num, num_tokens
