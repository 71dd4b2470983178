"""Repetition, presence and frequency penalties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Bool, Float32, Int32

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.steps.sampling.processors.processor import Arrays, LogitsProcessor, RowArray, Rows

# Tokens of each row that are counted at once.
_TOKENS_AT_ONCE = 256


@final
class Penalties(LogitsProcessor):
    """Lowers the logits of tokens that the prompt or the output has; see `SamplingParams`."""

    name = "penalties"
    slot_arrays = {
        "repetition": RowArray(np.float32, 1),
        "presence": RowArray(np.float32, 0),
        "frequency": RowArray(np.float32, 0),
    }

    def is_needed(self, params: SamplingParams) -> bool:
        """See `Processor`."""
        return (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )

    def pack(self, request: Request) -> Mapping[str, npt.ArrayLike]:
        """See `Processor`."""
        params = request.params
        return {
            "repetition": params.repetition_penalty,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
        }

    def apply(
        self, logits: Float32[Array, "rows vocab"], arrays: Arrays, rows: Rows
    ) -> Float32[Array, "rows vocab"]:
        """See `LogitsProcessor`."""
        factor, presence, frequency = (
            arrays[name][:, None] for name in ("repetition", "presence", "frequency")
        )
        needed = (factor != 1) | (presence != 0) | (frequency != 0)
        seen, count = _occurrences(rows, needed[:, 0], logits.shape[1])
        repeated = jnp.where(logits > 0, logits / factor, logits * factor)
        logits = jnp.where(seen, repeated, logits)
        return logits - count * frequency - jnp.where(count > 0, presence, 0.0)


def _occurrences(
    rows: Rows, needed: Bool[Array, " rows"], vocab: int
) -> tuple[Bool[Array, "rows vocab"], Float32[Array, "rows vocab"]]:
    """Return which tokens the text of a row has, and how often its output has each.

    The text is read in pieces up to the longest row that is needed, so that this costs what is
    there, not what the context could hold.
    """
    row = jnp.arange(rows.length.shape[0])[:, None]
    size = min(_TOKENS_AT_ONCE, rows.tokens.shape[1])

    def read(
        piece: Int32[Array, ""],
        found: tuple[Bool[Array, "rows vocab"], Float32[Array, "rows vocab"]],
    ) -> tuple[Bool[Array, "rows vocab"], Float32[Array, "rows vocab"]]:
        seen, count = found
        position = piece * size + jnp.arange(size)
        counts = position < rows.length[:, None]
        if rows.first is not None:
            counts &= position >= rows.first[:, None]
        token = jnp.where(counts, rows.tokens_from(piece * size, size), vocab)
        output = jnp.where(position >= rows.prompt_length[:, None], token, vocab)
        return (
            seen.at[row, token].set(True, mode="drop"),
            count.at[row, output].add(1.0, mode="drop"),
        )

    shape = (rows.length.shape[0], vocab)
    nothing = jnp.zeros(shape, jnp.bool_), jnp.zeros(shape, jnp.float32)
    num_pieces = -(-jnp.max(jnp.where(needed, rows.length, 0)) // size)
    return jax.lax.fori_loop(0, num_pieces, read, nothing)
