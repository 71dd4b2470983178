"""The policies that a benchmark compares: options, names, variants, baselines."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from jaxserve.core.errors import InvalidConfigError
from jaxserve.memory.eviction import LRU
from jaxserve.scheduling.iteration.iteration_level import IterationLevel
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import PRESETS, get_policy
from jaxserve.scheduling.retention.tiered import Tiered

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
# Policies that stand on predicted lengths, and the baselines beside which they are reported: one
# that needs no prediction, and one whose predictions are always right.
PREDICTING = ("s3", "auto")
BASELINES = ("vllm_like", "s3_oracle")


def add_policy_options(
    parser: argparse.ArgumentParser, *, policies: str, max_context: int | None
) -> None:
    """Add the options for policies, model, memory and output.

    Args:
      policies: the default of `--policies`.
      max_context: the default of `--max-context`; None for a benchmark that sets it itself.
    """
    known = ", ".join([*PRESETS, *VARIANTS])
    add = parser.add_argument
    add("--policies", default=policies, help=f"separated by commas; known are {known}")
    add("--model", default="smollm2-135m", help="a name, folder or GGUF file")
    add("--kv-memory", default=None, help='size of each page pool, e.g. "1GiB"')
    add("--predictor", default=None, help="folder of a trained predictor, for policies that use it")
    add("--max-slots", type=int, default=None, help="most sequences at once")
    if max_context is not None:
        text = "most tokens of prompt and answer"
        add("--max-context", type=int, default=max_context, help=text)
    add("--output", type=Path, default=None, help="also write the object here")


def parse_policies(names: str) -> list[Policy]:
    """Return the presets and variants of these names, separated by commas.

    Raises:
      InvalidConfigError: an unknown name, or a name given twice.
    """
    policies = [VARIANTS.get(name) or get_policy(name) for name in names.split(",")]
    if len({policy.name for policy in policies}) < len(policies):
        raise InvalidConfigError(f"policies {names!r} name one twice; give each once")
    return policies


def missing_baselines(names: Iterable[str]) -> list[str]:
    """Return the baselines that policies by predicted length are to be reported with, and lack."""
    given = set(names)
    return [name for name in BASELINES if name not in given] if given & set(PREDICTING) else []
