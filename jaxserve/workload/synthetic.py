"""Prompts of random tokens, for measurements that need no text."""

from __future__ import annotations

import numpy as np

from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload.item import WorkloadItem


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
