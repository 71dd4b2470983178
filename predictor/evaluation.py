"""Metrics of predictions, and a comparison with baselines on the same requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxserve.predictor.buckets import LengthBuckets
from jaxserve.predictor.calibration import Calibration, softmax
from jaxserve.predictor.data import Example, clipped, columns
from jaxserve.predictor.distribution import LengthDistributions

_RELIABILITY_BINS = 10


@final
@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Metrics on held-out requests.

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
        return np.tile(self._logits, (len(prompts), 1))


@final
class LinearBaseline:
    """Multinomial logistic regression on standardised features of the prompts.

    `features` maps prompts to float [prompts, features], such as lengths or mean-pooled embeddings.
    """

    def __init__(self, buckets: LengthBuckets, features: Features):
        self._buckets = buckets
        self._features = features
        self._weights = np.zeros((0, buckets.num))
        self._mean = self._scale = np.zeros(0)

    def fit(self, prompts: Sequence[str], lengths: Int[np.ndarray, " prompts"]) -> LinearBaseline:
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
        return self._standardised(self._features(prompts)) @ self._weights

    def _standardised(
        self, x: Float[np.ndarray, "prompts features"]
    ) -> Float[np.ndarray, "prompts columns"]:
        return np.concatenate([(x - self._mean) / self._scale, np.ones((len(x), 1))], axis=1)


def prompt_lengths(prompts: Sequence[str]) -> Float[np.ndarray, "prompts 4"]:
    counts = np.asarray([(len(p), len(p.split())) for p in prompts], np.float64).reshape(-1, 2)
    return np.concatenate([counts, np.log1p(counts)], axis=1)


# The target miss rates of the comparison's reservations.
PROMISES = (0.05, 0.1, 0.2, 0.3)

Logits = Callable[[Sequence[str]], np.ndarray]


@final
@dataclass(frozen=True, kw_only=True)
class Contender:
    """One predictor's metrics on test requests, after calibration.

    `missed` and `reserved` have, by target miss rate, the share of requests that outgrew their
    reservations, and the mean reservation in tokens. Of two predictors that meet the target, the
    one with the lower mean is better.
    """

    name: str
    evaluation: Evaluation
    missed: dict[float, float]
    reserved: dict[float, float]

    def to_dict(self) -> dict[str, Any]:
        figures = vars(self.evaluation) | {
            "calibration_error": self.evaluation.calibration_error,
            "promises": {
                str(promised): {"missed": missed, "reserved_tokens": self.reserved[promised]}
                for promised, missed in self.missed.items()
            },
        }
        return {"name": self.name, **figures}


def contender(
    name: str,
    buckets: LengthBuckets,
    logits: Logits,
    test: Sequence[Example],
    calibration: Calibration,
) -> Contender:
    prompts, lengths = columns(test)
    scaled = logits(prompts) / calibration.temperature
    predicted = LengthDistributions(buckets, softmax(scaled))
    reserved = {rate: predicted.quantile(calibration.level(rate)) for rate in PROMISES}
    return Contender(
        name=name,
        evaluation=evaluate(buckets, scaled, lengths),
        missed={rate: float((lengths > tokens).mean()) for rate, tokens in reserved.items()},
        reserved={rate: float(tokens.mean()) for rate, tokens in reserved.items()},
    )


def compare(
    buckets: LengthBuckets,
    logits: Logits,
    features: Features,
    learned: Sequence[Example],
    held_out: Sequence[Example],
    test: Sequence[Example],
    *,
    calibration: Calibration | None = None,
) -> list[Contender]:
    """Return the metrics of a predictor, then of the baselines.

    The baselines are majority, prompt length, and linear on embeddings. In all three sets of
    examples, a length over the buckets' longest counts as the longest.

    Args:
      logits: the predictor's function from prompts to logits [prompts, buckets].
      features: the linear baseline's features: embeddings of the encoder before it was trained.
      learned: training examples of the predictor and the baselines.
      held_out: examples that calibrate each of them.
      test: examples on which the metrics are computed.
      calibration: the predictor's calibration; by default it is fitted on `held_out`.

    Raises:
      ValueError: one of the three sets is empty.
    """
    if not (learned and held_out and test):
        raise ValueError(
            f"{len(learned)} examples to learn from, {len(held_out)} held out and {len(test)} to "
            "test on are not allowed; pass at least one of each"
        )
    learned, held_out, test = (
        clipped(part, buckets.max_length) for part in (learned, held_out, test)
    )
    baselines = {
        "majority": Majority(buckets),
        "prompt length": LinearBaseline(buckets, prompt_lengths),
        "linear on embeddings": LinearBaseline(buckets, features),
    }
    contenders: dict[str, Logits] = {"predictor": logits} | {
        name: baseline.fit(*columns(learned)).logits for name, baseline in baselines.items()
    }
    prompts, lengths = columns(held_out)
    done = []
    for name, own in contenders.items():
        fitted = calibration if name == "predictor" else None
        fitted = fitted or Calibration.fit(buckets, own(prompts), lengths)
        done.append(contender(name, buckets, own, test, fitted))
    return done
