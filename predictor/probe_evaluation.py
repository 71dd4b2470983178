"""How well what is left of answers is known, by how many tokens have come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from predictor.buckets import LengthBuckets
from predictor.distribution import LengthDistributions
from predictor.probe import LengthProbe
from predictor.probe_training import Readings


@final
@dataclass(frozen=True, kw_only=True)
class RemainingFigures:
    """Of one way to predict, over the answers that had not ended after `elapsed` tokens.

    Attributes:
      elapsed: None for all readings together.
      error_tokens: mean absolute difference between expected and true remaining length.
      accuracy: share whose likeliest bucket of remaining length was the right one.
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
    """Survival alone, single readings, and readings weighed into beliefs.

    Args:
      test: of answers that the probe has not seen.
      elapsed: tokens that had come where figures are wanted; those at which nothing was read, or
        to which no answer came, are left out.
      predicted: output lengths of the test's answers by name, such as an encoder's: each is
        compared too, with survival alone and as what readings refine. The marginal always is.
    """
    refinement, logits = probe.refinement, probe.logits(test.activations)
    marginal = LengthDistributions(refinement.buckets, refinement.marginal[None])
    ways = {"single readings": _Known.of(probe.predict(test.activations))}
    for name, lengths in {"marginal": marginal, **(predicted or {})}.items():
        first = np.broadcast_to(lengths.probabilities, (len(test.lengths), lengths.buckets.num))
        after = LengthDistributions(lengths.buckets, first[test.answer])
        ways[f"{name}, survival"] = _Known(
            after.remaining(test.elapsed, refinement.buckets),
            after.expected_remaining(test.elapsed),
        )
        believed = refinement.first(LengthDistributions(lengths.buckets, first))
        refined = refinement.along(logits, test.answer, test.elapsed, believed)
        ways[f"{name}, refined"] = _Known.of(LengthDistributions(refinement.buckets, refined))
    return [
        figures
        for name, known in ways.items()
        for at in (*elapsed, None)
        if (figures := _figures(name, refinement.buckets, known, test, at)) is not None
    ]


@final
@dataclass(frozen=True, eq=False)
class _Known:
    """Of each reading: probabilities [readings, buckets], and expected tokens [readings]."""

    probabilities: np.ndarray
    expected: np.ndarray

    @classmethod
    def of(cls, lengths: LengthDistributions) -> _Known:
        return cls(lengths.probabilities, lengths.expected_remaining())


def _figures(
    name: str, buckets: LengthBuckets, known: _Known, test: Readings, at: int | None
) -> RemainingFigures | None:
    is_wanted = np.full(len(test.elapsed), True) if at is None else test.elapsed == at
    rows = np.flatnonzero(is_wanted)
    if not len(rows):
        return None
    remaining = np.minimum(test.remaining[rows], buckets.max_length)
    right = buckets.bucket_of(remaining)
    probabilities = known.probabilities[rows]
    of_right = np.maximum(probabilities[np.arange(len(rows)), right], 1e-12)
    return RemainingFigures(
        name=name,
        elapsed=at,
        num=len(rows),
        error_tokens=float(np.abs(known.expected[rows] - remaining).mean()),
        accuracy=float((probabilities.argmax(1) == right).mean()),
        cross_entropy=float(-np.log(of_right).mean()),
    )
