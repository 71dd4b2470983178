"""The largest entries of each row, exact, in one pass over a wide vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Entries of a block: one pass takes the maximum of each, the rest reads few blocks.
_BLOCK = 64


def argmax(x: jax.Array) -> tuple[jax.Array, jax.Array]:  # f32 [R, V]
    """Return the index (i32 [R], lowest of equals) and value (f32 [R]) of each row's maximum.

    A row that holds a NaN gives any index below V and any value.
    """
    blocks = _blocks(x, -jnp.inf)
    maxima = jnp.max(blocks, axis=-1)
    block = jnp.argmax(maxima, axis=-1).astype(jnp.int32)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    index = block * _BLOCK + jnp.argmax(inside, axis=-1).astype(jnp.int32)
    return jnp.minimum(index, x.shape[1] - 1), jnp.max(maxima, axis=-1)


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:  # f32 [R, V]
    """Return values and indices [R, k] as `jax.lax.top_k`: largest first, lower index of equals.

    The k largest entries lie in the k blocks with the largest maxima. The blocks stay in index
    order, so that equal entries do too. A row that holds a NaN gives arbitrary values.
    """
    num_blocks = -(-x.shape[1] // _BLOCK)
    if k >= num_blocks:
        return jax.lax.top_k(x, k)
    blocks = _blocks(x, -jnp.inf)
    _, chosen = jax.lax.top_k(jnp.max(blocks, axis=-1), k)
    chosen = jnp.sort(chosen, axis=-1)
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(x.shape[0], -1)
    values, places = jax.lax.top_k(candidates, k)
    block = jnp.take_along_axis(chosen, places // _BLOCK, axis=1)
    return values, jnp.minimum(block * _BLOCK + places % _BLOCK, x.shape[1] - 1)


def _blocks(x: jax.Array, fill: float) -> jax.Array:
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % _BLOCK)), constant_values=fill)
    return padded.reshape(x.shape[0], -1, _BLOCK)
