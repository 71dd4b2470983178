"""What is believed of answers' remaining lengths, refined by what a probe reads as tokens come.

A belief is a distribution over buckets of remaining length, as of some number of output tokens.
Between two readings it is moved on by the tokens that came: what would have ended is ruled out. A
reading is then weighed in, as in TRAIL's Bayesian filter (arXiv:2410.01035, section 3.2); but
readings of one answer are far from independent, so that both sides have exponents, which are
learned from answers that were held out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from predictor.buckets import LengthBuckets
from predictor.calibration import softmax
from predictor.distribution import LengthDistributions

# Of a bucket that was believed impossible: enough for a few readings to bring it back.
_LEAST = 1e-4


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Refinement:
    """How beliefs change. NumPy only, so that a scheduler can do without JAX.

    Attributes:
      buckets: of remaining lengths.
      marginal: float [buckets], of whole answers: what is believed where nothing was predicted.
      temperature: logits are divided by it; see `Calibration`.
      belief_weight, reading_weight: exponents of what was believed and of what is read; (1, 1) is
        TRAIL's filter, (0, 1) forgets everything but the newest reading.
      interval: tokens from one reading to the next.
    """

    buckets: LengthBuckets
    marginal: np.ndarray
    temperature: float = 1.0
    belief_weight: float = 1.0
    reading_weight: float = 1.0
    interval: int = 16

    def __post_init__(self) -> None:
        if np.shape(self.marginal) != (self.buckets.num,):
            raise ValueError(
                f"marginal{np.shape(self.marginal)}: expected [{self.buckets.num}], one a bucket"
            )
        if self.interval < 1 or self.temperature <= 0.0:
            raise ValueError(
                f"interval={self.interval} and temperature={self.temperature} must be over 0"
            )

    def first(self, lengths: LengthDistributions | None, num: int = 1) -> np.ndarray:
        """Before any reading [sequences, buckets], from predicted output lengths or from none.

        Args:
          num: of sequences, where nothing was predicted of them.
        """
        if lengths is None:
            return np.tile(self.marginal, (num, 1))
        return lengths.remaining(0, self.buckets)

    def moved_on(self, beliefs: np.ndarray, passed: np.ndarray) -> np.ndarray:
        """Beliefs [sequences, buckets] after `passed` more tokens (int [sequences]).

        One that is refuted, since more came than it thought possible, gives way to the marginal.
        """
        moved = LengthDistributions(self.buckets, beliefs).remaining(passed, self.buckets)
        is_over = np.asarray(passed) >= self.buckets.max_length
        return np.where(is_over[:, None], self.marginal, moved)

    def refined(self, beliefs: np.ndarray, passed: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """Beliefs [sequences, buckets], moved on by `passed` tokens, after a reading.

        Args:
          logits: float [sequences, buckets], the probe's. Rows that are not finite say nothing.

        Raises:
          ValueError: there are not so many.
        """
        if np.shape(logits) != np.shape(beliefs):
            raise ValueError(
                f"logits{np.shape(logits)} of beliefs{np.shape(beliefs)}: not one each"
            )
        moved = self.moved_on(beliefs, passed)
        is_usable = np.isfinite(logits).all(1, keepdims=True)
        read = np.where(is_usable, logits, 0.0) / self.temperature
        known = np.log(np.maximum(moved, _LEAST))
        weighed = softmax(self.belief_weight * known + self.reading_weight * read)
        return np.where(is_usable, weighed, moved)

    def along(
        self, logits: np.ndarray, answer: np.ndarray, elapsed: np.ndarray, first: np.ndarray
    ) -> np.ndarray:
        """Beliefs [readings, buckets] right after each reading of several answers.

        Args:
          logits: float [readings, buckets].
          answer: int [readings], from 0 on, sorted.
          elapsed: int [readings], tokens that had come; rising within an answer.
          first: float [answers, buckets], before any reading.
        """
        beliefs, at = np.array(first, np.float64), np.zeros(len(first), np.int64)
        after = np.zeros_like(logits, np.float64)
        number = np.arange(len(answer)) - np.searchsorted(answer, answer)
        for turn in range(int(number.max(initial=-1)) + 1):
            rows = np.flatnonzero(number == turn)
            who = answer[rows]
            after[rows] = self.refined(beliefs[who], elapsed[rows] - at[who], logits[rows])
            beliefs[who], at[who] = after[rows], elapsed[rows]
        return after
