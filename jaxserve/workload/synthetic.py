"""Prompts of random tokens, for measurements that need no text."""

from __future__ import annotations

import numpy as np

from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload.item import WorkloadItem


def random_items(
    num: int, *, num_prompt_tokens: int, num_output_tokens: int, vocab_size: int, seed: int
) -> list[WorkloadItem]:
    """`num` prompts of uniformly random token ids, all of the same lengths.

    Raises:
      InvalidConfigError: a count below one.
    """
    for name, value in (
        ("num", num),
        ("num_prompt_tokens", num_prompt_tokens),
        ("num_output_tokens", num_output_tokens),
        ("vocab_size", vocab_size),
    ):
        if value < 1:
            raise InvalidConfigError(f"{name}={value} must be at least 1")
    tokens = np.random.default_rng(seed).integers(0, vocab_size, (num, num_prompt_tokens))
    return [
        WorkloadItem(
            prompt_token_ids=tuple(row),
            num_output_tokens=num_output_tokens,
            max_tokens=num_output_tokens,
        )
        for row in tokens.tolist()
    ]
