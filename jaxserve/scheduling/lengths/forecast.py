"""What is expected of several sequences together, given the tokens that each has so far."""

from __future__ import annotations

from typing import final

import numpy as np

from predictor import LengthDistributions

# Points in time at which the use of memory is evaluated.
_NUM_TIMES = 32


@final
class Forecast:
    """Survival and memory use of sequences. Times are output tokens from now on, for all of them.

    Args:
      lengths: distribution of the output tokens that were still to come of each [sequences].
      elapsed: output tokens that have come since then, int [sequences].
      left: output tokens up to each one's limit, int [sequences].
    """

    def __init__(self, lengths: LengthDistributions, elapsed: np.ndarray, left: np.ndarray):
        self._lengths = lengths
        self._elapsed = elapsed
        self._left = left

    def expected_remaining(self) -> np.ndarray:
        """Return the mean number of tokens still to come [sequences]."""
        return np.minimum(self._lengths.expected_remaining(self._elapsed), self._left)

    def survival(self, times: np.ndarray) -> np.ndarray:
        """Return P(still running after `times` more tokens) [sequences, times]."""
        alive = self._lengths.survival(self._elapsed, times)
        # A sequence that is longer than every bucket is taken to go on to its limit.
        is_over = self._elapsed >= self._lengths.buckets.max_length
        alive = np.where(is_over[:, None] | (times <= 0.0), 1.0, alive)
        return alive * (times < np.maximum(self._left, 1)[:, None])

    def expected_ends(self, times: np.ndarray) -> np.ndarray:
        """Return the mean number of sequences that end within `times` more tokens [times]."""
        return (1.0 - self.survival(times)).sum(0)

    def peak_tokens(self, held: np.ndarray, margin: float) -> float:
        """Return the most tokens in memory at any time to come.

        A sequence that ends frees its memory, so the peak is far below the sum of the sequences'
        final lengths.

        Args:
          held: tokens of each sequence in memory now [sequences].
          margin: standard deviations of the memory in use, added to the mean.
        """
        known = np.maximum(self._lengths.buckets.max_length - self._elapsed, 0)
        longest = np.where(known > 0, np.minimum(known, self._left), self._left).max()
        # Closer together at first, while most of the sequences still run.
        times = np.linspace(0.0, 1.0, _NUM_TIMES) ** 2 * max(1.0, float(longest))
        alive = self.survival(times)
        tokens = held[:, None] + times
        mean = (alive * tokens).sum(0)
        variance = (alive * (1.0 - alive) * tokens**2).sum(0)
        return float((mean + margin * np.sqrt(variance)).max())
