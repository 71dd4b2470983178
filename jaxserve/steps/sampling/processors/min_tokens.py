"""The minimum length: a number of output tokens before which no stop token is chosen."""

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

_INT32_MAX = 2**31 - 1


@final
class MinTokens(LogitsProcessor):
    """Forbids stop tokens while prompt and output have fewer tokens than `length`."""

    name = "min_tokens"
    slot_arrays = {"length": RowArray(np.int32, 0)}

    def is_needed(self, params: SamplingParams) -> bool:
        """See `Processor`."""
        return params.min_tokens > 0

    def pack(self, request: Request) -> Mapping[str, npt.ArrayLike]:
        """See `Processor`."""
        return {"length": min(len(request.prompt) + request.params.min_tokens, _INT32_MAX)}

    def apply(
        self, logits: Float32[Array, "rows vocab"], arrays: Arrays, rows: Rows
    ) -> Float32[Array, "rows vocab"]:
        """See `LogitsProcessor`."""
        row = jnp.arange(logits.shape[0])[:, None]
        is_short = (rows.length < arrays["length"])[:, None]
        forbidden = jnp.where(is_short & (rows.stop_ids >= 0), rows.stop_ids, logits.shape[1])
        return logits.at[row, forbidden].set(-jnp.inf, mode="drop")
