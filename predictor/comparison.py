"""A predictor beside the baselines, all given the same chances on the same requests."""

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

# Miss rates that reservations are held to.
PROMISES = (0.05, 0.1, 0.2, 0.3)

Logits = Callable[[Sequence[str]], np.ndarray]


@final
@dataclass(frozen=True, kw_only=True)
class Contender:
    """One predictor's figures on the requests of a test.

    Attributes:
      evaluation: after calibration.
      missed: by promised miss rate, the share of requests that outgrew their reservations.
      reserved: by promised miss rate, the mean reservation in tokens: of two that keep their
        promise, the lower is the better predictor.
    """

    name: str
    evaluation: Evaluation
    missed: dict[float, float]
    reserved: dict[float, float]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the evaluation's figures on top, promises by their text."""
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
    """The figures of whatever gives logits [prompts, buckets]."""
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
    """A predictor, and after it the baselines: majority, prompt length, linear on embeddings.

    Args:
      logits: the predictor's.
      features: what the linear baseline sees: embeddings of the encoder before it was trained.
      learned: what the baselines learn from, and the predictor did.
      held_out: calibrates every one of them.
      test: as all of these, longer answers count as the longest length.
      calibration: the predictor's own, to be measured in place of a new one.

    Raises:
      ValueError: one of the three is empty.
    """
    if not (learned and held_out and test):
        raise ValueError(
            f"{len(learned)} examples to learn from, {len(held_out)} held out and {len(test)} to "
            "test on; give some of each"
        )
    learned, held_out, test = (
        clipped(part, buckets.max_length) for part in (learned, held_out, test)
    )
    baselines = {
        "majority": Majority(buckets),
        "prompt length": Linear(buckets, prompt_lengths),
        "linear on embeddings": Linear(buckets, features),
    }
    all_of_them: dict[str, Logits] = {"predictor": logits} | {
        name: baseline.fit(*columns(learned)).logits for name, baseline in baselines.items()
    }
    prompts, lengths = columns(held_out)
    done = []
    for name, own in all_of_them.items():
        fitted = calibration if name == "predictor" else None
        fitted = fitted or Calibration.fit(buckets, own(prompts), lengths)
        done.append(contender(name, buckets, own, test, fitted))
    return done
