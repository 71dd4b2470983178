"""The figures of a format's quality, and how bad they may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from jaxserve.core.options import QUANTIZE

FORMATS = QUANTIZE


class Sums(NamedTuple):
    """Sums over tokens: minus the log-probability, the divergence, equal choices, and the tokens.

    The numbers may be traced.
    """

    loss: Any
    divergence: Any
    same: Any
    count: Any


@final
@dataclass(frozen=True, kw_only=True)
class Quality:
    """Means over tokens that are predicted.

    Attributes:
      perplexity: exp of the mean of minus the log-probability of the text's next token.
      divergence: KL divergence in nats of the next token's distribution from the unquantised
        model's.
      agreement: share of tokens for which both models have the same likeliest next token.
    """

    perplexity: float
    divergence: float
    agreement: float


@final
@dataclass(frozen=True, kw_only=True)
class Limit:
    """The most that a format should cost.

    Attributes:
      perplexity_ratio: the perplexity over the unquantised model's.
      divergence: see `Quality`.
    """

    perplexity_ratio: float
    divergence: float


# For models of 100 million parameters or more; larger ones lose less. "keep" rounds activations
# only.
LIMITS: Mapping[str, Limit] = {
    "bf16": Limit(perplexity_ratio=1.005, divergence=0.002),
    "int8": Limit(perplexity_ratio=1.01, divergence=0.01),
    "int4": Limit(perplexity_ratio=1.10, divergence=0.10),
    "fp8": Limit(perplexity_ratio=1.03, divergence=0.03),
    "w8a8": Limit(perplexity_ratio=1.05, divergence=0.05),
    "keep": Limit(perplexity_ratio=1.01, divergence=0.01),
}


def problems(name: str, figures: Mapping[str, Any], unquantised_perplexity: float) -> list[str]:
    """Return what is worse than it should be for a format."""
    limit, found = LIMITS[name], []
    ratio = figures["perplexity"] / unquantised_perplexity
    # Written so that NaN is a problem.
    if not ratio <= limit.perplexity_ratio:
        found.append(
            f"the perplexity is {ratio:.3f} times the unquantised model's; at most "
            f"{limit.perplexity_ratio} is expected"
        )
    if not figures["divergence"] <= limit.divergence:
        found.append(
            f"the KL divergence is {figures['divergence']:.4f}; at most {limit.divergence} is "
            "expected"
        )
    return found
