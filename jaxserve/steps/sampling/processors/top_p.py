"""Top-p: only the smallest set of tokens that reaches probability p can be drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.steps.sampling.choice import RandomChoice, least_gap, quantize, quantum
from jaxserve.steps.sampling.processors.processor import Arrays, ChoiceProcessor, RowArray, Rows


@final
class TopP(ChoiceProcessor):
    """Keeps the likeliest tokens whose probabilities reach p, of what is left by then.

    Tokens that are tied with the last one are kept too (Holtzman et al., 2020, section 3.1).
    """

    name = "top_p"
    slot_arrays = {"p": RowArray(np.float32, 1)}

    def is_needed(self, params: SamplingParams) -> bool:
        """See `Processor`."""
        return params.top_p < 1

    def pack(self, request: Request) -> Mapping[str, npt.ArrayLike]:
        """See `Processor`."""
        return {"p": request.params.top_p}

    def apply(self, choice: RandomChoice, arrays: Arrays, rows: Rows) -> RandomChoice:
        """See `ChoiceProcessor`."""
        p, nearest = arrays["p"], choice.nearest
        num_nearest = nearest.shape[1]
        likelihood = choice.likelihood
        unit = quantum(likelihood)
        weights = quantize(likelihood, unit)
        total = jnp.sum(weights, axis=-1)
        target = jnp.ceil(p * total.astype(jnp.float32)).astype(jnp.int32)
        target = jnp.clip(target, 1, total)
        reached = jnp.cumsum(quantize(choice.likelihood_of(nearest), unit), axis=-1)
        place = jnp.sum(reached < target[:, None], axis=-1, dtype=jnp.int32)
        last = jnp.minimum(place, num_nearest - 1)[:, None]
        limit = jnp.take_along_axis(nearest, last, axis=1)[:, 0]
        is_wide = (p < 1) & (place == num_nearest)
        limit = jax.lax.cond(
            jnp.any(is_wide),
            lambda: jnp.where(is_wide, least_gap(choice.gap, weights, target), limit),
            lambda: limit,
        )
        return choice.limited(jnp.where(p < 1, limit, jnp.inf))
