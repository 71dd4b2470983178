"""Bayesian refinement of predicted remaining lengths by a probe's readings.

The state is a distribution over buckets of remaining length, after some number of output tokens.
Between two readings the tokens generated since shift it and rule out lengths that have passed. A
reading then updates it as in TRAIL's Bayesian filter (arXiv:2410.01035, section 3.2). Readings of
one answer are not independent, so the prior and the reading each have an exponent, fitted on
held-out answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Float, Int

from jaxserve.predictor.buckets import LengthBuckets
from jaxserve.predictor.calibration import softmax
from jaxserve.predictor.distribution import LengthDistributions

# The least prior probability of a bucket, so that a few readings can raise it again.
_LEAST = 1e-4


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Refinement:
    """The update of remaining-length distributions. NumPy only, for use in the scheduler.

    Attributes:
      buckets: buckets of remaining length.
      marginal: float [buckets], the distribution of whole output lengths; the prior of a sequence
        without a prediction.
      temperature: logits are divided by it; see `Calibration`.
      belief_weight, reading_weight: exponents of the prior and of the reading; (1, 1) is TRAIL's
        filter, (0, 1) uses the newest reading alone.
      interval: tokens from one reading to the next.
    """

    buckets: LengthBuckets
    marginal: Float[np.ndarray, " buckets"]
    temperature: float = 1.0
    belief_weight: float = 1.0
    reading_weight: float = 1.0
    interval: int = 16

    def __post_init__(self) -> None:
        if np.shape(self.marginal) != (self.buckets.num,):
            raise ValueError(
                f"marginal{np.shape(self.marginal)} is not allowed; pass [{self.buckets.num}], one "
                "probability per bucket"
            )
        if self.interval < 1 or self.temperature <= 0.0:
            raise ValueError(
                f"interval={self.interval} and temperature={self.temperature} are not allowed; "
                "pass numbers over 0"
            )

    def first(
        self, lengths: LengthDistributions | None, num: int = 1
    ) -> Float[np.ndarray, "sequences buckets"]:
        """Return the distributions before any reading.

        Args:
          lengths: predicted output lengths; None for the marginal.
          num: number of sequences, if `lengths` is None.
        """
        if lengths is None:
            return np.tile(self.marginal, (num, 1))
        return lengths.remaining(0, self.buckets)

    def moved_on(
        self, prior: Float[np.ndarray, "sequences buckets"], passed: Int[np.ndarray, " sequences"]
    ) -> Float[np.ndarray, "sequences buckets"]:
        """Return the distributions after `passed` more tokens.

        A distribution whose longest length has passed is replaced by the marginal.
        """
        moved = LengthDistributions(self.buckets, prior).remaining(passed, self.buckets)
        is_over = np.asarray(passed) >= self.buckets.max_length
        return np.where(is_over[:, None], self.marginal, moved)

    def refined(
        self,
        prior: Float[np.ndarray, "sequences buckets"],
        passed: Int[np.ndarray, " sequences"],
        logits: Float[np.ndarray, "sequences buckets"],
    ) -> Float[np.ndarray, "sequences buckets"]:
        """Return the distributions after `passed` more tokens and a reading.

        Args:
          logits: from the probe. A row that is not finite is ignored.

        Raises:
          ValueError: `logits` and `prior` differ in shape.
        """
        if np.shape(logits) != np.shape(prior):
            raise ValueError(
                f"logits{np.shape(logits)} do not fit prior{np.shape(prior)}; pass one row per "
                "sequence"
            )
        moved = self.moved_on(prior, passed)
        is_usable = np.isfinite(logits).all(1, keepdims=True)
        read = np.where(is_usable, logits, 0.0) / self.temperature
        log_prior = np.log(np.maximum(moved, _LEAST))
        posterior = softmax(self.belief_weight * log_prior + self.reading_weight * read)
        return np.where(is_usable, posterior, moved)

    def along(
        self,
        logits: Float[np.ndarray, "readings buckets"],
        answer: Int[np.ndarray, " readings"],
        elapsed: Int[np.ndarray, " readings"],
        first: Float[np.ndarray, "answers buckets"],
    ) -> Float[np.ndarray, "readings buckets"]:
        """Return the distributions after each reading of several answers.

        Args:
          answer: the index of each reading's answer, sorted.
          elapsed: tokens generated before the reading; increasing within an answer.
          first: the distributions before any reading.
        """
        prior, at = np.array(first, np.float64), np.zeros(len(first), np.int64)
        after = np.zeros_like(logits, np.float64)
        number = np.arange(len(answer)) - np.searchsorted(answer, answer)
        for index in range(int(number.max(initial=-1)) + 1):
            rows = np.flatnonzero(number == index)
            own = answer[rows]
            after[rows] = self.refined(prior[own], elapsed[rows] - at[own], logits[rows])
            prior[own], at[own] = after[rows], elapsed[rows]
        return after
