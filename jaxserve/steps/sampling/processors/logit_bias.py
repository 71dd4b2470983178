"""Logit bias: numbers that a request adds to the logits of single tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float32

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import MAX_LOGIT_BIAS, SamplingParams
from jaxserve.steps.sampling.processors.processor import Arrays, LogitsProcessor, RowArray, Rows


@final
class LogitBias(LogitsProcessor):
    """Adds `SamplingParams.logit_bias`. `ids` are padded with -1."""

    name = "logit_bias"
    slot_arrays = {
        "ids": RowArray(np.int32, -1, (MAX_LOGIT_BIAS,)),
        "values": RowArray(np.float32, 0, (MAX_LOGIT_BIAS,)),
    }

    def is_needed(self, params: SamplingParams) -> bool:
        """See `Processor`."""
        return bool(params.logit_bias)

    def pack(self, request: Request) -> Mapping[str, npt.ArrayLike]:
        """See `Processor`."""
        bias = request.params.logit_bias or {}
        return {"ids": list(bias), "values": list(bias.values())}

    def apply(
        self, logits: Float32[Array, "rows vocab"], arrays: Arrays, rows: Rows
    ) -> Float32[Array, "rows vocab"]:
        """See `LogitsProcessor`."""
        row = jnp.arange(logits.shape[0])[:, None]
        biased = jnp.where(arrays["ids"] >= 0, arrays["ids"], logits.shape[1])
        return logits.at[row, biased].add(arrays["values"], mode="drop")
