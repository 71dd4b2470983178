"""Baselines that a predictor must beat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np
from jaxtyping import Float, Int

from predictor.buckets import LengthBuckets

Features = Callable[[Sequence[str]], np.ndarray]

_RIDGE = 1e-2
_ROUNDS = 300


@final
class Majority:
    """A baseline that predicts the training lengths' distribution for every prompt."""

    def __init__(self, buckets: LengthBuckets):
        self._buckets = buckets
        self._logits = np.zeros(buckets.num)

    def fit(self, prompts: Sequence[str], lengths: Int[np.ndarray, " prompts"]) -> Majority:
        counts = np.bincount(self._buckets.bucket_of(lengths), minlength=self._buckets.num)
        self._logits = np.log((counts + 1.0) / (counts.sum() + self._buckets.num))
        return self

    def logits(self, prompts: Sequence[str]) -> Float[np.ndarray, "prompts buckets"]:
        """Return logits."""
        return np.tile(self._logits, (len(prompts), 1))


@final
class Linear:
    """Multinomial logistic regression on standardised features of the prompts.

    Args:
      features: maps prompts to float [prompts, features], such as their lengths or mean-pooled
        embeddings.
    """

    def __init__(self, buckets: LengthBuckets, features: Features):
        self._buckets = buckets
        self._features = features
        self._weights = np.zeros((0, buckets.num))
        self._mean = self._scale = np.zeros(0)

    def fit(self, prompts: Sequence[str], lengths: Int[np.ndarray, " prompts"]) -> Linear:
        """Fit by full-batch gradient descent with Nesterov momentum; the loss is convex."""
        x = self._features(prompts)
        self._mean, self._scale = x.mean(0), x.std(0) + 1e-8
        x = self._standardised(x)
        wanted = np.eye(self._buckets.num)[self._buckets.bucket_of(lengths)]
        # The loss's curvature is at most half the largest eigenvalue of the second moment of x.
        rate = 2.0 / (np.linalg.eigvalsh(x.T @ x / len(x))[-1] + _RIDGE)
        weights = ahead = np.zeros((x.shape[1], self._buckets.num))
        for step in range(_ROUNDS):
            logits = x @ ahead
            probabilities = np.exp(logits - logits.max(1, keepdims=True))
            probabilities /= probabilities.sum(1, keepdims=True)
            gradient = x.T @ (probabilities - wanted) / len(x) + _RIDGE * ahead / len(x)
            new = ahead - rate * gradient
            ahead = new + step / (step + 3.0) * (new - weights)
            weights = new
        self._weights = weights
        return self

    def logits(self, prompts: Sequence[str]) -> Float[np.ndarray, "prompts buckets"]:
        """Return logits."""
        return self._standardised(self._features(prompts)) @ self._weights

    def _standardised(
        self, x: Float[np.ndarray, "prompts features"]
    ) -> Float[np.ndarray, "prompts columns"]:
        return np.concatenate([(x - self._mean) / self._scale, np.ones((len(x), 1))], axis=1)


def prompt_lengths(prompts: Sequence[str]) -> Float[np.ndarray, "prompts 4"]:
    """Return the numbers of characters and words and their logarithms."""
    counts = np.asarray([(len(p), len(p.split())) for p in prompts], np.float64).reshape(-1, 2)
    return np.concatenate([counts, np.log1p(counts)], axis=1)
