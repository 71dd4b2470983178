"""Figures of merit of predictions: of buckets, of lengths, and of their confidence."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Bool, Float, Int

from predictor.buckets import LengthBuckets
from predictor.calibration import softmax
from predictor.distribution import LengthDistributions

_RELIABILITY_BINS = 10


@final
@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Figures on held-out requests.

    Attributes:
      accuracy: share of requests whose likeliest bucket is the right one.
      wrong_by: mean distance in buckets of the other requests (the paper's second figure); 0
        without such requests.
      error_tokens: mean absolute difference between expected and true length.
      under_prediction: share of requests that outgrew their likeliest bucket; S3 preempts these.
      cross_entropy: mean, in nats.
      reliability: (mean confidence, accuracy, share of requests) of each non-empty bin of
        confidence.
    """

    accuracy: float
    wrong_by: float
    error_tokens: float
    under_prediction: float
    cross_entropy: float
    reliability: tuple[tuple[float, float, float], ...]

    @property
    def calibration_error(self) -> float:
        """Expected difference between confidence and accuracy (Naeini et al. 2015)."""
        return sum(
            share * abs(confidence - accuracy) for confidence, accuracy, share in self.reliability
        )


def evaluate(
    buckets: LengthBuckets,
    logits: Float[np.ndarray, "requests buckets"],
    lengths: Int[np.ndarray, " requests"],
) -> Evaluation:
    """Evaluate logits against true output lengths."""
    probabilities = softmax(logits)
    right = buckets.bucket_of(lengths)
    likeliest = probabilities.argmax(1)
    distance = np.abs(likeliest - right)
    expected = LengthDistributions(buckets, probabilities).expected_remaining(0)
    of_right = probabilities[np.arange(len(right)), right]
    return Evaluation(
        accuracy=float((distance == 0).mean()),
        wrong_by=float(distance[distance > 0].mean()) if distance.any() else 0.0,
        error_tokens=float(np.abs(expected - np.minimum(lengths, buckets.max_length)).mean()),
        under_prediction=float((likeliest < right).mean()),
        cross_entropy=float(-np.log(np.maximum(of_right, 1e-300)).mean()),
        reliability=_reliability(probabilities.max(1), distance == 0),
    )


def miss_rates(
    predicted: LengthDistributions, lengths: Int[np.ndarray, " requests"], levels: Sequence[float]
) -> list[float]:
    """Return the share of requests that outgrow their quantile, for each level."""
    return [float((lengths > predicted.quantile(level)).mean()) for level in levels]


def milliseconds_a_prompt(
    logits: Callable[[Sequence[str]], np.ndarray],
    prompts: Sequence[str],
    batch_size: int,
    *,
    repeats: int = 9,
) -> float:
    """Return the median time per prompt in ms, over `repeats` batches after one that compiles."""
    batches = [
        [prompts[(start + i) % len(prompts)] for i in range(batch_size)]
        for start in range(0, (repeats + 1) * batch_size, batch_size)
    ]
    logits(batches[0])
    times = []
    for batch in batches[1:]:
        begin_s = time.perf_counter()
        logits(batch)
        times.append(time.perf_counter() - begin_s)
    return 1e3 * float(np.median(times)) / batch_size


def _reliability(
    confidence: Float[np.ndarray, " requests"], is_right: Bool[np.ndarray, " requests"]
) -> tuple[tuple[float, float, float], ...]:
    index = np.minimum((confidence * _RELIABILITY_BINS).astype(int), _RELIABILITY_BINS - 1)
    return tuple(
        (float(confidence[chosen].mean()), float(is_right[chosen].mean()), float(chosen.mean()))
        for number in range(_RELIABILITY_BINS)
        if (chosen := index == number).any()
    )
