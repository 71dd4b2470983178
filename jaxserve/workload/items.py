"""Requests of a workload: their lengths and arrival times, and requests of random tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.sampling_params import SamplingParams


@final
@dataclass(frozen=True, kw_only=True)
class WorkloadItem:
    """A prompt and the forced length of its answer.

    Attributes:
      prompt_token_ids: at least one.
      num_output_tokens: exact number of generated tokens; hidden from the scheduler.
      sample_lengths: tokens of each sample, for a request with several; the longest is then
        `num_output_tokens`.
      max_tokens: the scheduler's limit of the length; None for the context's end.
      arrival_s: seconds after the start of the run.
      sampling: sampling parameters; greedy by default.
      priority, deadline_s, conversation_id: see `Runtime.submit`.
    """

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    sample_lengths: tuple[int, ...] | None = None
    max_tokens: int | None = None
    arrival_s: float = 0.0
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    deadline_s: float | None = None
    conversation_id: str | None = None

    def params(self) -> SamplingParams:
        """Return sampling parameters that generate exactly the forced length."""
        return replace(
            self.sampling,
            max_tokens=self.max_tokens,
            forced_length=self.sample_lengths or self.num_output_tokens,
            ignore_eos=True,
        )


def random_items(
    num: int,
    *,
    num_prompt_tokens: int,
    num_output_tokens: int,
    min_output_tokens: int | None = None,
    vocab_size: int,
    seed: int,
) -> list[WorkloadItem]:
    """Return `num` prompts of uniformly random token ids, all of one length.

    Args:
      num_output_tokens: length of every answer. With `min_output_tokens`, lengths are uniform
        between the two (Flover, section VI-D), and the scheduler knows only this one.

    Raises:
      InvalidConfigError: a count is below 1, or `min_output_tokens` is over `num_output_tokens`.
    """
    least = num_output_tokens if min_output_tokens is None else min_output_tokens
    for name, value in (
        ("num", num),
        ("num_prompt_tokens", num_prompt_tokens),
        ("num_output_tokens", num_output_tokens),
        ("min_output_tokens", least),
        ("vocab_size", vocab_size),
    ):
        if value < 1:
            raise InvalidConfigError(f"{name}={value} is not allowed; pass at least 1")
    if least > num_output_tokens:
        raise InvalidConfigError(
            f"min_output_tokens={least} is not allowed; pass at most "
            f"num_output_tokens={num_output_tokens}"
        )
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab_size, (num, num_prompt_tokens))
    lengths = rng.integers(least, num_output_tokens + 1, num)
    return [
        WorkloadItem(
            prompt_token_ids=tuple(row),
            num_output_tokens=length,
            max_tokens=num_output_tokens,
        )
        for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)
    ]


def with_arrivals(items: Sequence[WorkloadItem], pattern: str, seed: int) -> list[WorkloadItem]:
    """Return the items with arrival times, the first at 0.

    Args:
      pattern: "all" for all at once, "constant:S" for one every S seconds, or "poisson:R" for R
        per second on average.
      seed: seed of the Poisson draw.

    Raises:
      InvalidConfigError: the pattern is unknown, or its number is not above 0.
    """
    times = arrival_times(len(items), pattern, seed)
    return [replace(item, arrival_s=time) for item, time in zip(items, times, strict=True)]


def arrival_times(num: int, pattern: str, seed: int) -> list[float]:
    kind, _, number = pattern.partition(":")
    gaps = np.zeros(max(0, num - 1))
    if kind == "constant":
        gaps += _positive(number, pattern)
    elif kind == "poisson":
        gaps = np.random.default_rng(seed).exponential(1 / _positive(number, pattern), len(gaps))
    elif pattern != "all":
        raise _unknown(pattern)
    return [0.0, *np.cumsum(gaps).tolist()][:num]


def _positive(number: str, pattern: str) -> float:
    try:
        value = float(number)
    except ValueError:
        raise _unknown(pattern) from None
    if not 0 < value < float("inf"):
        raise _unknown(pattern)
    return value


def _unknown(pattern: str) -> InvalidConfigError:
    return InvalidConfigError(
        f"arrivals {pattern!r} are unknown; pass all, constant:SECONDS or poisson:RATE, with a "
        "number above 0"
    )
