"""The model's own log-probabilities: of chosen tokens, and of the likeliest ones."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxserve.core.sampling_params import MAX_LOGPROBS
from jaxserve.steps.sampling.largest import top_k
from pallas_kernels import log_sum_exp


def log_normalizer(logits: Float32[Array, "rows vocab"]) -> Float32[Array, " rows"]:
    """Return what to subtract from a row's logits to get log-probabilities."""
    return log_sum_exp(logits)


def token_logprobs(
    logits: Float32[Array, "rows vocab"],
    token: Int32[Array, " rows"],
    normalizer: Float32[Array, " rows"],
) -> Float32[Array, " rows"]:
    """Return the log-probability of one token a row."""
    return jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0] - normalizer


def likeliest(
    logits: Float32[Array, "rows vocab"], normalizer: Float32[Array, " rows"]
) -> tuple[Int32[Array, "rows top"], Float32[Array, "rows top"]]:
    """Return ids and log-probabilities, likeliest first, then lowest id.

    A vocabulary of fewer than MAX_LOGPROBS leaves id 0 at minus infinity in the places past it.
    """
    k = min(MAX_LOGPROBS, logits.shape[1])
    values, ids = top_k(logits, k)
    short = ((0, 0), (0, MAX_LOGPROBS - k))
    values = jnp.pad(values - normalizer[:, None], short, constant_values=-jnp.inf)
    return jnp.pad(ids, short), values
