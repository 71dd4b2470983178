"""Allowed tokens: bit masks that come with a step, of the tokens that a grammar allows next."""

from __future__ import annotations

from typing import final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jaxserve.core.sampling_params import SamplingParams
from jaxserve.steps.sampling.processors.processor import Arrays, LogitsProcessor, RowArray, Rows

_WORD_BITS = 32


@final
class AllowedTokens(LogitsProcessor):
    """Forbids the tokens without a bit: bit t % 32 of a row's word t // 32 is token t's.

    Tokens beyond the last word are forbidden.
    """

    name = "allowed_tokens"
    step_arrays = {"words": RowArray(np.uint32, 2**_WORD_BITS - 1, has_vocab_bits=True)}

    def is_needed(self, params: SamplingParams) -> bool:
        """See `Processor`."""
        return params.is_constrained

    def apply(
        self, logits: Float32[Array, "rows vocab"], arrays: Arrays, rows: Rows
    ) -> Float32[Array, "rows vocab"]:
        """See `LogitsProcessor`."""
        words, vocab = arrays["words"], logits.shape[1]
        missing = max(0, -(-vocab // _WORD_BITS) - words.shape[1])
        words = jnp.pad(words, ((0, 0), (0, missing)))
        bits = words[:, :, None] >> jnp.arange(_WORD_BITS, dtype=jnp.uint32) & 1
        is_allowed = bits.reshape(words.shape[0], -1)[:, :vocab] > 0
        return jnp.where(is_allowed, logits, -jnp.inf)
