"""Calibration of probabilities, of reservations to a stated miss rate, and of what is served."""

from __future__ import annotations

import math
from collections import deque
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


# Answers that the corrections come from, and those that a prediction counts as in each of them.
_NUM_ANSWERS = 500
_TRUSTS = (0.0, 2.0, 8.0, 32.0, math.inf)
# Answers that the average share of ends in a bucket counts as, if predictions count as none.
_PRIOR = 2.0
# Weight of an answer's score when the next one has ended: about the newest hundred count.
_MEMORY = 0.99
# The least probability of a score.
_LEAST = 1e-3


@final
class Recalibration:
    """Predictions corrected by the lengths of the answers served.

    A prediction counts as much as some answers (its trust), beside the answers whose predictions
    had the same likeliest bucket. Both give the share of the answers that reach a bucket and end
    in it, so an answer that still runs counts for the buckets that it has passed (Kaplan and
    Meier, 1958); otherwise short answers, which end first, would count too much. The trust is that
    under which the lengths of the newest answers were likeliest when they ended. If it is
    infinite, predictions are left as they are; so good ones lose nothing. If it is 0, they only
    group the answers, and every bucket has a few more ends at the average rate of all.

    Attributes:
      is_informative: whether these lengths were likelier with predictions, under that trust, than
        as lengths of one group, whatever was predicted; True before any answer.
    """

    def __init__(self, buckets: LengthBuckets):
        self._buckets = buckets
        # Likeliest bucket of the prediction, length, and whether the answer ended there.
        self._answers: deque[tuple[int, int, bool]] = deque(maxlen=_NUM_ANSWERS)
        # Log likelihoods of the answers under each trust, and without predictions.
        self._scores = np.zeros(len(_TRUSTS) + 1)
        shape = buckets.num, buckets.num
        # By likeliest bucket: answers that ended in each bucket, and those that reached it.
        self._ends, self._reached = np.zeros(shape), np.zeros(shape)
        self._num_new = 0

    @property
    def is_due(self) -> bool:
        """Whether enough answers have ended since the last update: an eighth of them, or 32."""
        return self._num_new >= max(1, min(32, len(self._answers) // 8))

    @property
    def trust(self) -> float:
        """Answers that a prediction counts as; infinite if it is left as it is."""
        return _TRUSTS[len(_TRUSTS) - 1 - int(np.argmax(self._scores[-2::-1]))]

    @property
    def is_informative(self) -> bool:
        *scores, without = self._scores
        return not without or bool(max(scores) > without)

    def note(self, predicted: np.ndarray, length: int, *, is_whole: bool) -> None:
        """Count an answer and the [buckets] that were predicted; a cut one is not `is_whole`."""
        if is_whole:
            bucket = int(self._buckets.bucket_of(length))
            shares = self._under_each(predicted[None])[:, 0, bucket]
            self._scores = _MEMORY * self._scores + np.log(np.maximum(shares, _LEAST))
        self._answers.append((int(np.argmax(predicted)), length, is_whole))
        self._num_new += 1

    def update(self, predicted: np.ndarray, lengths: np.ndarray) -> None:
        """Take the answers noted so far, and those that run [answers, buckets], [answers]."""
        kinds, ended, is_whole = np.asarray(self._answers).T
        kinds = np.concatenate([kinds, np.argmax(predicted, axis=1)])
        lengths = np.concatenate([ended, lengths])
        is_whole = np.concatenate([is_whole, np.zeros(len(predicted), np.int64)]).astype(bool)
        edges = np.asarray(self._buckets.edges, np.float64)
        passed = np.clip((lengths[:, None] - edges[:-1]) / np.diff(edges), 0.0, 1.0)
        places = self._buckets.bucket_of(lengths)
        passed[is_whole, places[is_whole]] = 1.0
        self._ends[:], self._reached[:] = 0.0, 0.0
        np.add.at(self._ends, (kinds[is_whole], places[is_whole]), 1.0)
        np.add.at(self._reached, kinds, passed)
        self._num_new = 0

    def corrected(self, predicted: np.ndarray) -> np.ndarray:
        """Return predictions [rows, buckets] corrected, as of the last update."""
        return self._with_trust(predicted, self.trust)

    def _with_trust(self, predicted: np.ndarray, trust: float) -> np.ndarray:
        if math.isinf(trust) or not self._reached.any():
            return predicted
        kinds = np.argmax(predicted, axis=1)
        if trust:
            prior, left = trust * predicted, trust * predicted[:, ::-1].cumsum(1)[:, ::-1]
        else:
            prior, left = self._few_ends()
        return _shares(self._ends[kinds] + prior, self._reached[kinds] + left)

    def _under_each(self, predicted: np.ndarray) -> np.ndarray:
        """Return shares under each trust, and without predictions [trusts + 1, rows, buckets]."""
        without = np.broadcast_to(self._without_predictions(), predicted.shape)
        return np.stack([*(self._with_trust(predicted, trust) for trust in _TRUSTS), without])

    def _without_predictions(self) -> np.ndarray:
        """Return the shares of all answers that end in each bucket [buckets]; equal before any."""
        if not self._ends.any():
            return np.full(self._buckets.num, 1.0 / self._buckets.num)
        ends, reached = self._few_ends()
        return _shares((self._ends.sum(0) + ends)[None], (self._reached.sum(0) + reached)[None])[0]

    def _few_ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ends at the average rate, and reached buckets, of a few answers [buckets]."""
        rate = self._ends.sum() / max(self._reached.sum(), 1e-12)
        reached = _PRIOR * (1.0 - rate) ** np.arange(self._buckets.num)
        return rate * reached, reached


def _shares(ends: np.ndarray, reached: np.ndarray) -> np.ndarray:
    """Return the shares that end in each bucket, of those that reach each [rows, buckets]."""
    stops = np.where(reached > 0, ends / np.maximum(reached, 1e-12), 1.0)
    stops[:, -1] = 1.0
    alive = np.cumprod(1.0 - np.minimum(stops, 1.0), axis=1)
    return stops * np.concatenate([np.ones((len(alive), 1)), alive[:, :-1]], axis=1)
