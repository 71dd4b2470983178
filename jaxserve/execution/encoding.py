"""Prompts of encoder-decoder models: packed into batches, encoded, and split again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxserve.steps.encoding import pack_prompts
from jaxserve.steps.programs import Programs


def encode_prompts(
    programs: Programs, params: Any, prompts: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Return the encoder's output for each prompt, float32 [tokens, embed].

    The prompts have at most `max_step_tokens` tokens together.
    """
    place = programs.place
    batch = jax.device_put(pack_prompts(programs.config, prompts), place.whole)
    with place.in_force():
        encoded = np.asarray(programs.encode(params, batch), np.float32)
    ends = np.cumsum([len(prompt) for prompt in prompts])
    return [
        encoded[end - len(prompt) : end].copy() for end, prompt in zip(ends, prompts, strict=True)
    ]


def in_steps(
    prompts: Sequence[Sequence[int]], max_tokens: int
) -> Iterator[Sequence[Sequence[int]]]:
    """Yield batches of consecutive prompts with at most `max_tokens` tokens each."""
    start, num_tokens = 0, 0
    for index, prompt in enumerate(prompts):
        if num_tokens + len(prompt) > max_tokens:
            yield prompts[start:index]
            start, num_tokens = index, 0
        num_tokens += len(prompt)
    if prompts:
        yield prompts[start:]
