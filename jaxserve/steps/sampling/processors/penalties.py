"""Repetition, presence and frequency penalties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float32

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.steps.sampling.processors.processor import Arrays, LogitsProcessor, RowArray, Rows


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
        row = jnp.arange(logits.shape[0])[:, None]
        position = jnp.arange(rows.tokens.shape[1])[None, :]
        nowhere = logits.shape[1]
        counts = position < rows.length[:, None]
        if rows.first is not None:
            counts &= position >= rows.first[:, None]
        seen = jnp.where(counts, rows.tokens, nowhere)
        output = jnp.where(position >= rows.prompt_length[:, None], seen, nowhere)

        # Every occurrence writes the same value, so a token seen twice is still penalized once.
        factor = arrays["repetition"][:, None]
        before = logits.at[row, seen].get(mode="fill", fill_value=0.0)
        after = jnp.where(before > 0, before / factor, before * factor)
        logits = logits.at[row, seen].set(after, mode="drop")

        count = jnp.zeros(logits.shape, jnp.float32).at[row, output].add(1.0, mode="drop")
        logits -= count * arrays["frequency"][:, None]
        return logits - jnp.where(count > 0, arrays["presence"][:, None], 0.0)
