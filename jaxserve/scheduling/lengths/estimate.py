"""What is expected of the length of one answer."""

from __future__ import annotations

from functools import cached_property
from typing import final

from jaxserve.core.prediction import LengthPrediction


@final
class LengthEstimate:
    """The expected length of one answer, as of its newest prediction or reading. Immutable.

    Lengths are output tokens, counted from the answer's first one. Results are computed once.

    Args:
      prediction: distribution of the output tokens that were still to come.
      at: output tokens that had come at that time; 0 for a prediction from the prompt.
    """

    def __init__(self, prediction: LengthPrediction, at: int = 0):
        self.prediction = prediction
        self.at = at
        self._quantile: tuple[float, int, int] | None = None

    @cached_property
    def likeliest_length(self) -> int:
        """The longest length of the likeliest bucket (S3, section 3.2)."""
        return self.at + self.prediction.likeliest_length

    @cached_property
    def expected_length(self) -> float:
        """The mean, without regard to tokens that have come since `at`."""
        return self.at + self.prediction.mean_length

    def percentile(self, level: float, num_outputs: int) -> int:
        """Return the length that a part `level` of answers with these tokens do not outgrow.

        Args:
          num_outputs: as in `quantile`.
        """
        lengths = self.prediction.distribution
        return self.at + int(lengths.quantile(level, num_outputs - self.at)[0])

    def expected_remaining(self, num_outputs: int) -> float:
        """Return the mean number of tokens still to come.

        Args:
          num_outputs: as in `quantile`.
        """
        lengths = self.prediction.distribution
        return float(lengths.expected_remaining(num_outputs - self.at)[0])

    def quantile(self, miss_rate: float, num_outputs: int) -> int:
        """Return a length that at most `miss_rate` of answers outgrow.

        Args:
          num_outputs: output tokens that have come, at least `at`; the answer is longer than that.
        """
        known = self._quantile
        if known is None or known[:2] != (miss_rate, num_outputs):
            length = self.at + self.prediction.quantile(miss_rate, num_outputs - self.at)
            self._quantile = known = (miss_rate, num_outputs, length)
        return known[2]
