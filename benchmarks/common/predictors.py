"""Length predictors for the workloads of benchmarks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.prediction import LengthPrediction
from jaxserve.workload import WorkloadItem

if TYPE_CHECKING:
    from jaxserve.runtime.forecaster import Predictor
    from predictor import LengthDistributions, LengthPredictor


def load_predictor(options: argparse.Namespace) -> Predictor | None:
    """Load the predictor of `--predictor`, scaled by `--output-scale`; None without the option.

    Raises:
      InvalidConfigError: the folder does not hold a predictor.
    """
    if options.predictor is None:
        return None
    from predictor import LengthPredictor

    try:
        predictor = LengthPredictor.load(options.predictor)
    except ValueError as error:
        raise InvalidConfigError(f"--predictor: {error}") from error
    scale = getattr(options, "output_scale", 1.0)
    return predictor if scale == 1.0 else Scaled(predictor, scale)


@final
class Scaled:
    """A predictor for a workload whose answers are `scale` times as long as those it learned."""

    def __init__(self, predictor: LengthPredictor, scale: float):
        from predictor import LengthBuckets

        self._predictor = predictor
        edges = [math.ceil(scale * edge) for edge in predictor.buckets.edges]
        self._buckets = LengthBuckets(tuple(edges))
        # Levels of the distribution, which scaling does not change.
        self.calibration = predictor.calibration

    def predict(self, prompts: Sequence[str], /) -> LengthDistributions:
        """Return the scaled distributions, see `LengthPredictor.predict`."""
        from predictor import LengthDistributions

        return LengthDistributions(self._buckets, self._predictor.predict(prompts).probabilities)


def predictions_of(
    predictor: Predictor | None, items: Sequence[WorkloadItem], tokenizer: Any
) -> list[LengthPrediction] | None:
    """Return what a runtime with this predictor predicts for each item, for simulations."""
    if predictor is None:
        return None
    predicted = predictor.predict([tokenizer.decode(item.prompt_token_ids) for item in items])
    return [
        LengthPrediction(predicted.buckets, row, predictor.calibration)
        for row in predicted.probabilities
    ]
