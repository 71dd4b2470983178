"""The product in plain XLA, for every platform and sharding."""

from __future__ import annotations

import jax
from jax import lax


def matmul(
    x: jax.Array, weight: jax.Array, *, transposed: bool, out_dtype: jax.typing.DTypeLike
) -> jax.Array:
    """See `api.matmul`."""
    contracted = ((1,), (1 if transposed else 0,))
    return lax.dot_general(x, weight, (contracted, ((), ())), preferred_element_type=out_dtype)
