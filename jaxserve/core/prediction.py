"""What is believed of an answer's length before it has ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from predictor import Calibration, LengthBuckets, LengthDistributions


@final
@dataclass(frozen=True, eq=False)
class LengthPrediction:
    """The predicted output length of one prompt.

    Attributes:
      probabilities: float [buckets].
      calibration: what promises are kept with; None if the predictor was not calibrated.
    """

    buckets: LengthBuckets
    probabilities: np.ndarray
    calibration: Calibration | None = None

    @property
    def likeliest_length(self) -> int:
        """The longest length of the likeliest bucket: what S3 takes for the answer's length."""
        usable = np.nan_to_num(self.probabilities, nan=-1.0)
        return int(self.buckets.upper(int(np.argmax(usable))))

    @property
    def expected_length(self) -> int:
        """The mean, rounded up."""
        return math.ceil(stacked([self]).expected_remaining()[0])

    def quantile(self, miss_rate: float, elapsed: int = 0) -> int:
        """A length that at most `miss_rate` of requests outgrow, `elapsed` tokens having come."""
        level = 1.0 - miss_rate
        if self.calibration is not None:
            level = self.calibration.level(miss_rate)
        return int(stacked([self]).quantile(level, elapsed)[0])


def stacked(predictions: Sequence[LengthPrediction | None]) -> LengthDistributions:
    """Predictions of one predictor together; of those that are None nothing is known.

    Raises:
      ValueError: all are None.
    """
    known = next((each for each in predictions if each is not None), None)
    if known is None:
        raise ValueError("no prediction among them")
    flat = np.diff(known.buckets.edges) / known.buckets.max_length
    rows = [flat if each is None else each.probabilities for each in predictions]
    return LengthDistributions(known.buckets, np.stack(rows))
