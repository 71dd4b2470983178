"""What is expected of several sequences together, given the tokens that each has so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from predictor import LengthDistributions

# Points in time at which the use of memory is evaluated.
_NUM_TIMES = 32
_TIMES = np.linspace(0.0, 1.0, _NUM_TIMES) ** 2


@final
@dataclass(frozen=True)
class MemoryUse:
    """Tokens in memory at times to come, which depend on when sequences end.

    Attributes:
      mean, variance: over the lengths of the sequences [times].
    """

    mean: np.ndarray
    variance: np.ndarray

    def plus(self, other: MemoryUse) -> MemoryUse:
        """Return the use of these sequences and of others, at the same times."""
        return MemoryUse(self.mean + other.mean, self.variance + other.variance)

    def peak(self, margin: float | np.ndarray) -> float:
        """Return the most tokens at any time.

        Args:
          margin: standard deviations that are added to the mean, at all times or at each [times].
        """
        return float((self.mean + margin * np.sqrt(self.variance)).max())


def memory_times(longest: float) -> np.ndarray:
    """Return the times of `Forecast.memory`: closer together at first, while most still run."""
    return _TIMES * longest


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
        alive[self._elapsed >= self._lengths.buckets.max_length] = 1.0
        alive[:, times <= 0.0] = 1.0
        alive *= times < np.maximum(self._left, 1)[:, None]
        return alive

    def expected_ends(self, times: np.ndarray) -> np.ndarray:
        """Return the mean number of sequences that end within `times` more tokens [times]."""
        return (1.0 - self.survival(times)).sum(0)

    @property
    def longest(self) -> float:
        """The time at which the last sequence has ended, at the latest; at least 1."""
        return float(self.longest_of_each().max())

    def longest_of_each(self) -> np.ndarray:
        """Return the time at which each has ended, at the latest; at least 1 [sequences]."""
        known = np.maximum(self._lengths.buckets.max_length - self._elapsed, 0)
        longest = np.where(known > 0, np.minimum(known, self._left), self._left)
        return np.maximum(longest, 1.0)

    def memory(self, held: np.ndarray, longest: float) -> MemoryUse:
        """Return the memory in use from now until `longest`.

        A sequence that ends frees its memory, so the peak is far below the sum of the sequences'
        final lengths.

        Args:
          held: tokens of each sequence in memory now [sequences].
        """
        used, free = self._memory(held, longest)
        return MemoryUse(used.sum(0), np.einsum("st,st->t", used, free))

    def memory_of_each(self, held: np.ndarray, longest: float) -> list[MemoryUse]:
        """Return the memory of each sequence alone, see `memory`; equal to the last bit."""
        used, free = self._memory(held, longest)
        return [MemoryUse(*each) for each in zip(used, used * free, strict=True)]

    def _memory(self, held: np.ndarray, longest: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens in memory, and those that were freed instead [sequences, times].

        Both are means: of the tokens that a sequence would have if it went on.
        """
        times = memory_times(longest)
        tokens = held[:, None] + times
        used = self.survival(times)
        used *= tokens
        return used, tokens - used
