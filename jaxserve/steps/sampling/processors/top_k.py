"""Top-k: only the k likeliest tokens can be drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.steps.sampling.choice import RandomChoice, least_gap
from jaxserve.steps.sampling.processors.processor import Arrays, ChoiceProcessor, RowArray, Rows


@final
class TopK(ChoiceProcessor):
    """Keeps the k likeliest tokens, and all that are tied with the last of them."""

    name = "top_k"
    slot_arrays = {"k": RowArray(np.int32, 0)}

    def is_needed(self, params: SamplingParams) -> bool:
        """See `Processor`."""
        return params.top_k > 0

    def pack(self, request: Request) -> Mapping[str, npt.ArrayLike]:
        """See `Processor`."""
        return {"k": request.params.top_k}

    def apply(self, choice: RandomChoice, arrays: Arrays, rows: Rows) -> RandomChoice:
        """See `ChoiceProcessor`."""
        k, nearest = arrays["k"], choice.nearest
        num_nearest = nearest.shape[1]
        last = jnp.clip(k - 1, 0, num_nearest - 1)[:, None]
        limit = jnp.take_along_axis(nearest, last, axis=1)[:, 0]
        is_wide = k > num_nearest
        ones = jnp.ones(choice.gap.shape, jnp.int32)
        limit = jax.lax.cond(
            jnp.any(is_wide),
            lambda: jnp.where(is_wide, least_gap(choice.gap, ones, k), limit),
            lambda: limit,
        )
        return choice.limited(jnp.where(k > 0, limit, jnp.inf))
