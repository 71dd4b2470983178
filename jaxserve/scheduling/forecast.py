"""What is expected of sequences that run, given the tokens that have come of each."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Self, final

import numpy as np

from jaxserve.core.prediction import stacked
from jaxserve.scheduling.sequence import Sequence
from predictor import LengthDistributions

# Points in time at which the use of memory is looked at.
_NUM_TIMES = 32


@final
class Forecast:
    """Vectorised over sequences. Times are output tokens from now on, the same for all of them.

    Args:
      lengths: predicted output lengths [sequences], or what was left when they were refined.
      elapsed: output tokens that have come since, int [sequences].
      left: output tokens that each may still have, int [sequences].
    """

    def __init__(self, lengths: LengthDistributions, elapsed: np.ndarray, left: np.ndarray):
        self._lengths = lengths
        self._elapsed = elapsed
        self._left = left

    @classmethod
    def of(cls, sequences: Seq[Sequence]) -> Self | None:
        """None where nothing was predicted of any of them."""
        predictions = [sequence.prediction for sequence in sequences]
        if all(prediction is None for prediction in predictions):
            return None
        return cls(
            stacked(predictions),
            np.asarray([each.num_planned_outputs - each.predicted_at for each in sequences]),
            np.asarray([sequence.num_outputs_left for sequence in sequences]),
        )

    def expected_remaining(self) -> np.ndarray:
        """Tokens [sequences]."""
        return np.minimum(self._lengths.expected_remaining(self._elapsed), self._left)

    def survival(self, times: np.ndarray) -> np.ndarray:
        """P(still running after so many more tokens) [sequences, times]."""
        alive = self._lengths.survival(self._elapsed, times)
        # One that has outlived every bucket may go on to its limit, for all that is known.
        is_over = self._elapsed >= self._lengths.buckets.max_length
        alive = np.where(is_over[:, None] | (times <= 0.0), 1.0, alive)
        return alive * (times < np.maximum(self._left, 1)[:, None])

    def expected_ends(self, times: np.ndarray) -> np.ndarray:
        """How many of them will have ended after so many more tokens [times]."""
        return (1.0 - self.survival(times)).sum(0)

    def peak_tokens(self, held: np.ndarray, margin: float) -> float:
        """The most tokens in memory at any time to come, with a margin of standard deviations.

        A sequence that ends gives its memory back, so the peak is far under the sum of what each
        of them will have at its own end.

        Args:
          held: tokens of each in memory now [sequences].
        """
        known = np.maximum(self._lengths.buckets.max_length - self._elapsed, 0)
        longest = np.where(known > 0, np.minimum(known, self._left), self._left).max()
        # Closer together at first, when most of them still run.
        times = np.linspace(0.0, 1.0, _NUM_TIMES) ** 2 * max(1.0, float(longest))
        alive = self.survival(times)
        tokens = held[:, None] + times
        mean = (alive * tokens).sum(0)
        variance = (alive * (1.0 - alive) * tokens**2).sum(0)
        return float((mean + margin * np.sqrt(variance)).max())
