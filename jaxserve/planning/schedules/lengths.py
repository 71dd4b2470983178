"""Length distributions, and the decode phases that follow from them (ExeGPT, section 6)."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError
from jaxserve.predictor import LengthDistributions
from jaxserve.workload.tasks import Lengths, Task

# Longest prompt and answer in tokens that plans allow. Distributions hold a number per length and
# schedules several, so an absurd length would take all memory.
MAX_PROMPT, MAX_OUTPUT = 1 << 24, 1 << 17


@final
class LengthDistribution:
    """A distribution over whole lengths in tokens, from 0 to a maximum.

    Args:
      probabilities: weights of the lengths 0, 1, 2, ..., float [max_length + 1], which are
        normalised. Trailing zeros are dropped.

    Raises:
      InvalidConfigError: a weight is negative or not finite, or none is above 0.
    """

    def __init__(self, probabilities: np.ndarray):
        given = np.asarray(probabilities, np.float64)
        if given.ndim != 1 or not (np.isfinite(given).all() and (given >= 0).all() and given.any()):
            raise InvalidConfigError(
                f"length probabilities of shape {given.shape} are not allowed; pass one dimension "
                "of numbers that are finite, not negative, and not all 0"
            )
        given = given[: np.flatnonzero(given)[-1] + 1]
        self.probabilities = given / given.sum()

    @classmethod
    def of_task(cls, lengths: Lengths) -> LengthDistribution:
        """Return a task's truncated normal distribution (table 3)."""
        return cls(np.concatenate([[0.0], lengths.probabilities()]))

    @classmethod
    def of_samples(cls, lengths: Sequence[int]) -> LengthDistribution:
        """Return the distribution of observed lengths in tokens; they must be 0 or more."""
        if not len(lengths) or min(lengths) < 0:
            raise InvalidConfigError(
                f"{len(lengths)} observed lengths are not allowed; pass at least one, and none "
                "below 0"
            )
        return cls(np.bincount(np.asarray(lengths, np.int64)))

    @classmethod
    def of_predictions(cls, predicted: LengthDistributions) -> LengthDistribution:
        """Return the mixture of predictions; lengths within a bucket are equally likely."""
        shares = predicted.probabilities.mean(0)
        widths = np.diff(predicted.buckets.edges)
        return cls(np.concatenate([[0.0], np.repeat(shares / widths, widths)]))

    @property
    def max_length(self) -> int:
        return len(self.probabilities) - 1

    @cached_property
    def mean(self) -> float:
        return float(self.probabilities @ np.arange(self.max_length + 1))

    @cached_property
    def mean_square(self) -> float:
        """E(S^2), to which attention over a whole prompt is proportional."""
        return float(self.probabilities @ np.arange(self.max_length + 1) ** 2)

    @cached_property
    def mean_position(self) -> float:
        """Mean position of a token drawn from all tokens, counted from 1; 0 without tokens."""
        return (self.mean_square + self.mean) / (2 * self.mean) if self.mean else 0.0

    @cached_property
    def survival(self) -> np.ndarray:
        """P(S >= u) for u = 0 ... max_length, float [max_length + 1]."""
        return np.cumsum(self.probabilities[::-1])[::-1]

    def percentile(self, level: float) -> int:
        """Return the smallest length s with P(S <= s) >= level."""
        reached = np.cumsum(self.probabilities) >= level - 1e-12
        return int(np.argmax(reached)) if reached.any() else self.max_length

    def less_one(self) -> LengthDistribution:
        """Return the distribution of max(0, S - 1): the iterations of a decoder-only model."""
        shifted = self.probabilities[1:].copy()
        if not len(shifted):
            return self
        shifted[0] += self.probabilities[0]
        return LengthDistribution(shifted)


@final
@dataclass(frozen=True)
class TaskLengths:
    """Input and output lengths, assumed independent (section 6).

    Attributes:
      level: quantile of the output lengths for which a latency bound must hold.
      max_together: most tokens of a prompt and its answer; None for the longest of both.
    """

    inputs: LengthDistribution
    outputs: LengthDistribution
    level: float = 0.99
    max_together: int | None = None

    @classmethod
    def of_task(cls, task: Task) -> TaskLengths:
        return cls(
            LengthDistribution.of_task(task.inputs), LengthDistribution.of_task(task.outputs)
        )

    def check_context(self, max_context: int) -> None:
        """Raise InvalidConfigError unless each prompt and its answer fit in a context."""
        longest = self.inputs.max_length + self.outputs.max_length
        if self.max_together is not None:
            longest = self.max_together
        if longest > max_context:
            raise InvalidConfigError(
                f"lengths of up to {longest} prompt and output tokens together do not fit in a "
                f"context of {max_context}; pass shorter lengths or a larger max_context"
            )

    def check_fits(self, config: EngineConfig) -> None:
        """Check that an engine's context allows requests of these lengths.

        Raises:
          InvalidConfigError: the context, or a step for an encoder's prompts, is too short.
        """
        self.check_context(config.max_context)
        longest, most = self.inputs.max_length, config.max_prompt_tokens
        if config.has_encoder and longest > most:
            raise InvalidConfigError(
                f"prompts of up to {longest} tokens are refused by this engine, whose encoder "
                f"takes {most} in a step; pass shorter lengths or a larger max_step_tokens"
            )


def lengths_of(lengths: Iterable[tuple[int, int]] | np.ndarray) -> TaskLengths:
    """Return the distributions of prompt and output lengths.

    Raises:
      InvalidConfigError: see `pairs_of`.
    """
    pairs = pairs_of(lengths)
    longest = max(pairs.sum(axis=1).tolist())
    inputs, outputs = pairs.T.tolist()
    return TaskLengths(
        LengthDistribution.of_samples(inputs),
        LengthDistribution.of_samples(outputs),
        max_together=longest,
    )


def pairs_of(lengths: Iterable[tuple[int, int]] | np.ndarray) -> np.ndarray:
    """Return prompt and output lengths as int64 [pairs, 2].

    Raises:
      InvalidConfigError: there are none, or one is not a pair of whole numbers from 1 to
        `MAX_PROMPT` and `MAX_OUTPUT`.
    """
    try:
        pairs: np.ndarray = np.array([[*pair] for pair in lengths])
    except (TypeError, ValueError, OverflowError):
        pairs = np.zeros((0, 2))
    is_whole = pairs.dtype.kind in "iu" and pairs.ndim == 2 and pairs.shape[1] == 2
    if not is_whole or pairs.min() < 1 or (pairs > (MAX_PROMPT, MAX_OUTPUT)).any():
        raise InvalidConfigError(
            f"lengths={reprlib.repr(lengths)} is not allowed; pass (prompt tokens, output tokens) "
            f"of at least one answer, as whole numbers of 1 to {MAX_PROMPT:,} and 1 to "
            f"{MAX_OUTPUT:,}"
        )
    return pairs.astype(np.int64)


def cautious_level(num: float) -> float:
    """Return the quantile of `num` lengths that reaches the 99th percentile of all lengths.

    It adds one standard deviation of the share of lengths below that percentile, sqrt(0.99 0.01 /
    num). So few answers make a cautious plan, and the most that are kept nearly the plan for their
    distribution.
    """
    return min(1.0, 0.99 + math.sqrt(0.99 * 0.01 / num))
