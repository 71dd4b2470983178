"""The minimum length: a number of output tokens before which no end or stop token is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float32

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from jaxserve.steps.sampling.processors.processor import Arrays, LogitsProcessor, RowArray, Rows

_INT32_MAX = 2**31 - 1


@final
class MinTokens(LogitsProcessor):
    """Forbids tokens while prompt and output have fewer tokens than `length`.

    They are those that end the row, and the model's end tokens where it ignores them, as in vLLM.
    `ids` are padded with -1.
    """

    name = "min_tokens"
    slot_arrays = {
        "length": RowArray(np.int32, 0),
        "ids": RowArray(np.int32, -1, (MAX_STOP_TOKEN_IDS,)),
    }

    def is_needed(self, params: SamplingParams) -> bool:
        """See `Processor`."""
        return params.min_tokens > 0

    def pack(self, request: Request) -> Mapping[str, npt.ArrayLike]:
        """See `Processor`."""
        return {
            "length": min(len(request.prompt) + request.params.min_tokens, _INT32_MAX),
            "ids": list(dict.fromkeys((*request.stop_token_ids, *request.end_token_ids))),
        }

    def apply(
        self, logits: Float32[Array, "rows vocab"], arrays: Arrays, rows: Rows
    ) -> Float32[Array, "rows vocab"]:
        """See `LogitsProcessor`."""
        row = jnp.arange(logits.shape[0])[:, None]
        is_short = (rows.length < arrays["length"])[:, None]
        forbidden = jnp.where(is_short & (arrays["ids"] >= 0), arrays["ids"], logits.shape[1])
        return logits.at[row, forbidden].set(-jnp.inf, mode="drop")
