"""The product in plain XLA, for every platform and sharding."""

from __future__ import annotations

import jax
from jax import lax
from jaxtyping import Array, Float, Int32


def matmul(
    x: Float[Array, "tokens in"],
    weight: Float[Array, " rows *columns"],
    *,
    transposed: bool,
    out_dtype: jax.typing.DTypeLike,
) -> Float[Array, " tokens *out"]:
    contracted = ((1,), (1 if transposed else 0,))
    return lax.dot_general(x, weight, (contracted, ((), ())), preferred_element_type=out_dtype)


def grouped_matmul(
    x: Float[Array, "tokens in"],
    weight: Float[Array, " matrices in out"],
    sizes: Int32[Array, " matrices"],
) -> Float[Array, "tokens out"]:
    return lax.ragged_dot(x, weight, sizes)
