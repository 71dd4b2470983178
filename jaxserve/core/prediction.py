"""The predicted length of an answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.predictor import Calibration, LengthBuckets, LengthDistributions


@final
@dataclass(frozen=True, eq=False)
class LengthPrediction:
    """The predicted output length of one prompt.

    Attributes:
      probabilities: float [buckets].
      calibration: learned on held-out requests; None if the predictor was not calibrated.
    """

    buckets: LengthBuckets
    probabilities: np.ndarray
    calibration: Calibration | None = None

    @property
    def likeliest_length(self) -> int:
        """The longest length of the likeliest bucket: the predicted length of S3, section 3.2."""
        usable = np.nan_to_num(self.probabilities, nan=-1.0)
        return int(self.buckets.upper(int(np.argmax(usable))))

    @property
    def distribution(self) -> LengthDistributions:
        """Return the probabilities of one prompt, which sum to 1: [1, buckets]."""
        return LengthDistributions(self.buckets, self.probabilities[None])

    @property
    def mean_length(self) -> float:
        return float(self.distribution.expected_remaining()[0])

    @property
    def expected_length(self) -> int:
        return math.ceil(self.mean_length)

    def quantile(self, miss_rate: float, elapsed: int = 0) -> int:
        """Return a length that at most `miss_rate` of requests over `elapsed` tokens exceed."""
        level = 1.0 - miss_rate
        if self.calibration is not None:
            level = self.calibration.level(miss_rate)
        return int(self.distribution.quantile(level, elapsed)[0])
