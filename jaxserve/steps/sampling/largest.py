"""The largest entries of each row, exact, in one pass over a wide vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels import row_maximum
from pallas_kernels.pointwise.xla import BLOCK as _BLOCK
from pallas_kernels.pointwise.xla import blocks_of


def argmax(
    x: Float32[Array, "rows vocab"],
) -> tuple[Int32[Array, " rows"], Float32[Array, " rows"]]:
    """Return the index (lowest of equals) and value of each row's maximum.

    A row that holds a NaN gives any index below `vocab` and any value.
    """
    return row_maximum(x)[:2]


def top_k(
    x: Float32[Array, "rows vocab"], k: int
) -> tuple[Float32[Array, "rows {k}"], Int32[Array, "rows {k}"]]:
    """Return values and indices as `jax.lax.top_k`: largest first, lower index of equals.

    The k largest entries lie in the k blocks with the largest maxima. The blocks stay in index
    order, so that equal entries do too. A row that holds a NaN gives arbitrary values.
    """
    num_blocks = -(-x.shape[1] // _BLOCK)
    if k >= num_blocks:
        values, index = jax.lax.top_k(x, k)
        return values, index
    blocks = blocks_of(x)
    _, chosen = jax.lax.top_k(jnp.max(blocks, axis=-1), k)
    chosen = jnp.sort(chosen, axis=-1)
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(x.shape[0], -1)
    values, places = jax.lax.top_k(candidates, k)
    block = jnp.take_along_axis(chosen, places // _BLOCK, axis=1)
    return values, jnp.minimum(block * _BLOCK + places % _BLOCK, x.shape[1] - 1)
