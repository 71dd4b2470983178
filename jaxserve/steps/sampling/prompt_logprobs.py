"""Log-probabilities of a prompt, a chunk of positions at a time."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.steps.sampling.logprobs import likeliest, log_normalizer, token_logprobs

# The log-probability of a token; the ids of the likeliest tokens in its place; theirs.
PromptLogprobs = tuple[
    Float32[Array, " tokens"], Int32[Array, "tokens top"], Float32[Array, "tokens top"]
]


def prompt_logprobs(
    project: Callable[[Float[Array, "chunk hidden"]], Float32[Array, "chunk vocab"]],
    hidden: Float[Array, "tokens hidden"],
    targets: Int32[Array, " tokens"],
    chunk: int = 64,
) -> PromptLogprobs:
    """Return the log-probability of each position's target, and the likeliest tokens there.

    Never holds more than [chunk, vocab] logits, however long the prompt is.

    Args:
      project: the model's head, from hidden states to logits.
      hidden: last hidden state of each position.
      targets: the token that follows each position.
      chunk: positions projected at once.
    """
    num_positions = targets.shape[0]
    extra = -num_positions % chunk
    hidden = jnp.pad(hidden, ((0, extra), (0, 0))).reshape(-1, chunk, hidden.shape[1])
    targets = jnp.pad(targets, (0, extra)).reshape(-1, chunk)

    def one_chunk(
        operands: tuple[Float[Array, "chunk hidden"], Int32[Array, " chunk"]],
    ) -> tuple[Float32[Array, " chunk"], Int32[Array, "chunk top"], Float32[Array, "chunk top"]]:
        logits = project(operands[0])
        normalizer = log_normalizer(logits)
        return (token_logprobs(logits, operands[1], normalizer), *likeliest(logits, normalizer))

    logprob, top_ids, top_logprobs = jax.lax.map(one_chunk, (hidden, targets))
    return (
        logprob.reshape(-1)[:num_positions],
        top_ids.reshape(-1, top_ids.shape[-1])[:num_positions],
        top_logprobs.reshape(-1, top_logprobs.shape[-1])[:num_positions],
    )
