"""The policies that a benchmark compares, and the length predictors that some of them need."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from benchmarks.common.harness import Option, option
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.prediction import LengthPrediction
from jaxserve.memory.eviction import LRU
from jaxserve.scheduling.iteration.continuous import IterationLevel
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import PRESETS, get_policy
from jaxserve.scheduling.retention import Tiered
from jaxserve.workload import WorkloadItem

if TYPE_CHECKING:
    from jaxserve.predictor import LengthDistributions, LengthPredictor
    from jaxserve.runtime.forecaster import Predictor


# The comparison of the Flover paper.
REQUEST_LEVEL_AND_ITERATION_LEVEL = (
    "fastertransformer,triton_window,concurrent_instances,orca,vllm_like,flover"
)
# For ablations: Flover without its memory shuffle, Pensieve with another eviction (section 3.6.3).
VARIANTS = {
    "pensieve_lru": replace(PRESETS["pensieve"], name="pensieve_lru", retention=Tiered(LRU())),
    "flover_without_shuffle": replace(
        PRESETS["flover"], name="flover_without_shuffle", iteration=IterationLevel(compacts=False)
    ),
}
# Policies that depend on predicted lengths, and the baselines reported next to them: one that needs
# no prediction, and one whose predictions are always right.
PREDICTING = ("s3", "auto")
BASELINES = ("vllm_like", "s3_oracle")


def policy_options(policies: str, *, max_context: int | None = 1024) -> tuple[Option, ...]:
    """Return the options for policies, model and memory, see `Runtimes`.

    Args:
      policies: the default of `--policies`.
      max_context: the default of `--max-context`; None for a benchmark that sets it itself.
    """
    known = ", ".join([*PRESETS, *VARIANTS])
    context = option("--max-context", max_context, "most tokens of prompt and answer")
    return (
        option("--policies", policies, f"separated by commas; known are {known}"),
        option("--model", "smollm2-135m", "a name, folder or GGUF file"),
        option("--kv-memory", None, 'size of each page pool, e.g. "1GiB"'),
        option("--predictor", None, "folder of a trained predictor, for policies that use it"),
        option("--max-slots", None, "most sequences at once", int),
        *(() if max_context is None else (context,)),
    )


def parse_policies(names: str) -> list[Policy]:
    """Return the presets and variants of these names, separated by commas."""
    policies = [VARIANTS.get(name) or get_policy(name) for name in names.split(",")]
    if len({policy.name for policy in policies}) < len(policies):
        raise InvalidConfigError(f"policies {names!r} name one twice; give each once")
    return policies


def missing_baselines(names: Iterable[str]) -> list[str]:
    """Return the missing baselines that policies by predicted length must be reported with."""
    given = set(names)
    return [name for name in BASELINES if name not in given] if given & set(PREDICTING) else []


def load_predictor(options: argparse.Namespace) -> Predictor | None:
    """Load the predictor of `--predictor`, scaled by `--output-scale`; None without the option."""
    if options.predictor is None:
        return None
    from jaxserve.predictor import LengthPredictor

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
        from jaxserve.predictor import LengthBuckets

        self._predictor = predictor
        edges = [math.ceil(scale * edge) for edge in predictor.buckets.edges]
        self._buckets = LengthBuckets(tuple(edges))
        # Levels of the distribution, which scaling does not change.
        self.calibration = predictor.calibration

    def predict(self, prompts: Sequence[str], /) -> LengthDistributions:
        """Return the scaled distributions of `LengthPredictor.predict`."""
        from jaxserve.predictor import LengthDistributions

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
