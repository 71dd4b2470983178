"""Evaluation of predicted remaining lengths, by the number of tokens generated so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Float

from predictor.buckets import LengthBuckets
from predictor.distribution import LengthDistributions
from predictor.probe import LengthProbe
from predictor.probe_training import Readings


@final
@dataclass(frozen=True, kw_only=True)
class RemainingFigures:
    """One method's figures, over the answers that were longer than `elapsed` tokens.

    Attributes:
      elapsed: tokens generated so far; None for all readings together.
      num: number of readings.
      error_tokens: mean absolute difference between expected and true remaining length.
      accuracy: share of readings whose likeliest bucket of remaining length is the right one.
      cross_entropy: mean, in nats.
    """

    name: str
    elapsed: int | None
    num: int
    error_tokens: float
    accuracy: float
    cross_entropy: float


def compare_remaining(
    probe: LengthProbe,
    test: Readings,
    elapsed: Sequence[int],
    predicted: Mapping[str, LengthDistributions] | None = None,
) -> list[RemainingFigures]:
    """Return the figures of survival alone, of single readings, and of refined predictions.

    Args:
      test: readings along answers that the probe was not trained on.
      elapsed: numbers of generated tokens to give figures for; a number without readings is
        omitted.
      predicted: name -> predicted output lengths of the test's answers, such as an encoder's. Each
        is evaluated with survival alone and refined by readings; the marginal always is.
    """
    refinement, logits = probe.refinement, probe.logits(test.activations)
    marginal = LengthDistributions(refinement.buckets, refinement.marginal[None])
    methods = {"single readings": _Prediction.of(probe.predict(test.activations))}
    for name, lengths in {"marginal": marginal, **(predicted or {})}.items():
        first = np.broadcast_to(lengths.probabilities, (len(test.lengths), lengths.buckets.num))
        after = LengthDistributions(lengths.buckets, first[test.answer])
        methods[f"{name}, survival"] = _Prediction(
            after.remaining(test.elapsed, refinement.buckets),
            after.expected_remaining(test.elapsed),
        )
        prior = refinement.first(LengthDistributions(lengths.buckets, first))
        refined = refinement.along(logits, test.answer, test.elapsed, prior)
        methods[f"{name}, refined"] = _Prediction.of(
            LengthDistributions(refinement.buckets, refined)
        )
    return [
        figures
        for name, prediction in methods.items()
        for at in (*elapsed, None)
        if (figures := _figures(name, refinement.buckets, prediction, test, at)) is not None
    ]


@final
@dataclass(frozen=True, eq=False)
class _Prediction:
    """A method's predictions of remaining length.

    Attributes:
      expected: remaining length, in tokens.
    """

    probabilities: Float[np.ndarray, "readings buckets"]
    expected: Float[np.ndarray, " readings"]

    @classmethod
    def of(cls, lengths: LengthDistributions) -> _Prediction:
        return cls(lengths.probabilities, lengths.expected_remaining())


def _figures(
    name: str, buckets: LengthBuckets, prediction: _Prediction, test: Readings, at: int | None
) -> RemainingFigures | None:
    is_wanted = np.full(len(test.elapsed), True) if at is None else test.elapsed == at
    rows = np.flatnonzero(is_wanted)
    if not len(rows):
        return None
    remaining = np.minimum(test.remaining[rows], buckets.max_length)
    right = buckets.bucket_of(remaining)
    probabilities = prediction.probabilities[rows]
    of_right = np.maximum(probabilities[np.arange(len(rows)), right], 1e-12)
    return RemainingFigures(
        name=name,
        elapsed=at,
        num=len(rows),
        error_tokens=float(np.abs(prediction.expected[rows] - remaining).mean()),
        accuracy=float((probabilities.argmax(1) == right).mean()),
        cross_entropy=float(-np.log(of_right).mean()),
    )
