"""Log-probabilities of a prompt, a chunk of positions at a time."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve.steps.sampling.logprobs import likeliest, log_normalizer, token_logprobs


def prompt_logprobs(
    project: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,  # [T, E]
    targets: jax.Array,  # i32 [T]
    chunk: int = 64,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probability of each position's target, and the likeliest tokens there.

    Never holds more than [chunk, vocab] logits, however long the prompt is.

    Args:
      project: the model's head, from hidden states [chunk, E] to logits f32 [chunk, vocab].
      hidden: last hidden state of each position.
      targets: the token that follows each position.
      chunk: positions projected at once.

    Returns:
      logprob f32 [T], top_ids i32 [T, MAX_LOGPROBS], top_logprobs f32 [T, MAX_LOGPROBS].
    """
    num_positions = targets.shape[0]
    extra = -num_positions % chunk
    hidden = jnp.pad(hidden, ((0, extra), (0, 0))).reshape(-1, chunk, hidden.shape[1])
    targets = jnp.pad(targets, (0, extra)).reshape(-1, chunk)

    def one_chunk(
        operands: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits = project(operands[0])
        normalizer = log_normalizer(logits)
        return (token_logprobs(logits, operands[1], normalizer), *likeliest(logits, normalizer))

    logprob, top_ids, top_logprobs = jax.lax.map(one_chunk, (hidden, targets))
    return (
        logprob.reshape(-1)[:num_positions],
        top_ids.reshape(-1, top_ids.shape[-1])[:num_positions],
        top_logprobs.reshape(-1, top_logprobs.shape[-1])[:num_positions],
    )
