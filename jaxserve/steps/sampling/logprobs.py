"""The model's own log-probabilities: of chosen tokens, and of the likeliest ones."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxserve.core.sampling_params import MAX_LOGPROBS
from jaxserve.kernels import log_sum_exp
from jaxserve.steps.sampling.choice import top_k


def log_normalizer(logits: Float32[Array, "rows vocab"]) -> Float32[Array, " rows"]:
    """Return what to subtract from a row's logits to get log-probabilities."""
    return log_sum_exp(logits)


def token_logprobs(
    logits: Float32[Array, "rows vocab"],
    token: Int32[Array, " rows"],
    normalizer: Float32[Array, " rows"],
) -> Float32[Array, " rows"]:
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


# The log-probability of a token before processors, and after them; the ids of the likeliest tokens
# at its position; theirs, before processors.
PromptLogprobs = tuple[
    Float32[Array, " tokens"],
    Float32[Array, " tokens"],
    Int32[Array, "tokens top"],
    Float32[Array, "tokens top"],
]
# (logits of some positions, their targets, the index of each) -> log-probabilities of the targets.
Process = Callable[
    [Float32[Array, "chunk vocab"], Int32[Array, " chunk"], Int32[Array, " chunk"]],
    Float32[Array, " chunk"],
]


def prompt_logprobs(
    project: Callable[[Float[Array, "chunk hidden"]], Float32[Array, "chunk vocab"]],
    hidden: Float[Array, "tokens hidden"],  # last hidden state of each position
    targets: Int32[Array, " tokens"],  # the token that follows each position
    is_processed: Bool[Array, " tokens"],  # positions to which processors apply
    process: Process,  # called for chunks with such positions; elsewhere it changes nothing
    chunk: int = 64,  # positions projected at once
) -> PromptLogprobs:
    """Return the log-probability of each position's target, and the likeliest tokens there.

    Never holds more than [chunk, vocab] logits, for any length of the prompt. `project` is the
    model's head.
    """
    num_positions = targets.shape[0]
    extra = -num_positions % chunk
    hidden = jnp.pad(hidden, ((0, extra), (0, 0))).reshape(-1, chunk, hidden.shape[1])
    index = jnp.minimum(jnp.arange(num_positions + extra), num_positions - 1).reshape(-1, chunk)

    def one_chunk(
        operands: tuple[Float[Array, "chunk hidden"], Int32[Array, " chunk"]],
    ) -> PromptLogprobs:
        logits, index = project(operands[0]), operands[1]
        normalizer, target = log_normalizer(logits), targets[index]
        logprob = token_logprobs(logits, target, normalizer)
        processed = jax.lax.cond(
            jnp.any(is_processed[index]),
            lambda: jnp.where(is_processed[index], process(logits, target, index), logprob),
            lambda: logprob,
        )
        return (logprob, processed, *likeliest(logits, normalizer))

    found = jax.lax.map(one_chunk, (hidden, index))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_positions], found)
