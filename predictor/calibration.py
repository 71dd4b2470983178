"""Calibration of probabilities, and of reservations to a stated miss rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Float, Int

from jaxserve.predictor.buckets import LengthBuckets
from jaxserve.predictor.distribution import LengthDistributions

_TEMPERATURES = (0.05, 20.0)
_ROUNDS = 60
# Added to a level to exceed it strictly.
_OVER = 1e-6


@final
@dataclass(frozen=True)
class Calibration:
    """A temperature and conformal levels, fitted on held-out requests.

    Attributes:
      temperature: logits are divided by it (Guo et al., arXiv:1706.04599).
      levels: sorted: the probability that the prediction gave to lengths shorter than the true one.
        A request outgrows a reservation at level q when its own level is q or more, so a conformal
        quantile of `levels` is the level for a miss rate (distributional conformal prediction,
        Chernozhukov et al., arXiv:1909.07889).
    """

    temperature: float
    levels: Float[np.ndarray, " requests"]

    @classmethod
    def fit(
        cls,
        buckets: LengthBuckets,
        logits: Float[np.ndarray, "requests buckets"],
        lengths: Int[np.ndarray, " requests"],
    ) -> Calibration:
        """Fit to held-out logits and true output lengths."""
        if len(logits) != len(lengths) or not len(lengths):
            raise ValueError(
                f"{len(logits)} predictions for {len(lengths)} lengths are not allowed; pass at "
                "least one of each, and equally many"
            )
        temperature = _best_temperature(logits, buckets.bucket_of(lengths))
        predicted = LengthDistributions(buckets, softmax(logits / temperature))
        return cls(temperature, np.sort(predicted.cdf(np.asarray(lengths) - 1)))

    def level(self, miss_rate: float) -> float:
        """Return the level whose quantile at most a share `miss_rate` of requests outgrows.

        The share is an average over draws of both held-out and new requests. The level is 1, which
        stands for the longest length, when too few requests were held out for a lower one.
        """
        if not 0.0 < miss_rate < 1.0:
            raise ValueError(f"miss_rate={miss_rate} is not allowed; pass a share between 0 and 1")
        rank = math.ceil((len(self.levels) + 1) * (1.0 - miss_rate))
        return 1.0 if rank > len(self.levels) else min(1.0, float(self.levels[rank - 1]) + _OVER)


def softmax(logits: Float[np.ndarray, "*rows buckets"]) -> Float[np.ndarray, "*rows buckets"]:
    """Return the softmax along the last axis, in float64."""
    logits = np.asarray(logits, np.float64)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _best_temperature(
    logits: Float[np.ndarray, "requests buckets"], buckets: Int[np.ndarray, " requests"]
) -> float:
    """Return the temperature of the lowest cross-entropy, which has one minimum."""
    logits = np.asarray(logits, np.float64)
    index = np.arange(len(buckets))

    def loss(log_temperature: float) -> float:
        scaled = logits / math.exp(log_temperature)
        top = scaled.max(1)
        total = top + np.log(np.exp(scaled - top[:, None]).sum(1))
        return float((total - scaled[index, buckets]).mean())

    low, high = (math.log(edge) for edge in _TEMPERATURES)
    ratio = (math.sqrt(5.0) - 1.0) / 2.0
    for _ in range(_ROUNDS):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if loss(left) < loss(right):
            high = right
        else:
            low = left
    return math.exp((low + high) / 2.0)
