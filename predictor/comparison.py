"""Comparison of a predictor with the baselines on the same requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from predictor.baselines import Features, Linear, Majority, prompt_lengths
from predictor.buckets import LengthBuckets
from predictor.calibration import Calibration, softmax
from predictor.data import Example, clipped, columns
from predictor.distribution import LengthDistributions
from predictor.evaluation import Evaluation, evaluate

# The target miss rates of the comparison's reservations.
PROMISES = (0.05, 0.1, 0.2, 0.3)

Logits = Callable[[Sequence[str]], np.ndarray]


@final
@dataclass(frozen=True, kw_only=True)
class Contender:
    """One predictor's figures on test requests.

    Attributes:
      evaluation: figures after calibration.
      missed: target miss rate -> share of requests that outgrew their reservations.
      reserved: target miss rate -> mean reservation in tokens. Of two predictors that meet the
        target, the one with the lower mean is better.
    """

    name: str
    evaluation: Evaluation
    missed: dict[float, float]
    reserved: dict[float, float]

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON; the evaluation's figures are at its top level."""
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
    """Return the figures of a function from prompts to logits [prompts, buckets]."""
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
    """Return the figures of a predictor, then of the baselines.

    The baselines are majority, prompt length, and linear on embeddings. In all three sets of
    examples, a length over the buckets' longest counts as the longest.

    Args:
      logits: the predictor's function from prompts to logits [prompts, buckets].
      features: the linear baseline's features: embeddings of the encoder before it was trained.
      learned: examples that the baselines learn from, and the predictor learned from.
      held_out: examples that calibrate each of them.
      test: examples that the figures are of.
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
        "prompt length": Linear(buckets, prompt_lengths),
        "linear on embeddings": Linear(buckets, features),
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
