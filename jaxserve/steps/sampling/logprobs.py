"""The model's own log-probabilities: of chosen tokens, and of the likeliest ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.core.sampling_params import MAX_LOGPROBS
from jaxserve.steps.sampling.largest import top_k


def log_normalizer(logits: jax.Array) -> jax.Array:  # f32 [R, V]
    """F32 [R]: subtract it from a row's logits to get log-probabilities."""
    return jax.nn.logsumexp(logits, axis=-1)


def token_logprobs(
    logits: jax.Array,  # f32 [R, V]
    token: jax.Array,  # i32 [R]
    normalizer: jax.Array,  # f32 [R]
) -> jax.Array:
    """F32 [R]: the log-probability of one token a row."""
    return jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0] - normalizer


def likeliest(
    logits: jax.Array,  # f32 [R, V]
    normalizer: jax.Array,  # f32 [R]
) -> tuple[jax.Array, jax.Array]:
    """Ids i32 and log-probabilities f32 [R, MAX_LOGPROBS], likeliest first, then lowest id.

    A vocabulary of fewer than MAX_LOGPROBS leaves id 0 at minus infinity in the places past it.
    """
    k = min(MAX_LOGPROBS, logits.shape[1])
    values, ids = top_k(logits, k)
    short = ((0, 0), (0, MAX_LOGPROBS - k))
    values = jnp.pad(values - normalizer[:, None], short, constant_values=-jnp.inf)
    return jnp.pad(ids, short), values
