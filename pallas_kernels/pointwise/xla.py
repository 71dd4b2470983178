"""Operations on each row in plain XLA, for every platform and sharding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

# Entries of a block: one pass takes the maximum of each, the rest reads few blocks.
BLOCK = 64


def rms_norm(
    x: Float[Array, "*rows width"], scale: Float[Array, " width"], *, eps: float, offset: float
) -> Float[Array, "*rows width"]:
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * (scale.astype(jnp.float32) + offset)).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*rows width"],
    scale: Float[Array, " width"],
    bias: Float[Array, " width"],
    *,
    eps: float,
) -> Float[Array, "*rows width"]:
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def log_sum_exp(x: Float32[Array, "rows width"]) -> Float32[Array, " rows"]:
    return jax.nn.logsumexp(x, axis=-1)


def gated_silu(x: Float[Array, "rows 2 width"]) -> Float[Array, "rows width"]:
    return jax.nn.silu(x[:, 0]) * x[:, 1]


def row_maximum(
    x: Float32[Array, "rows width"],
) -> tuple[Int32[Array, " rows"], Float32[Array, " rows"], Bool[Array, " rows"]]:
    blocks = blocks_of(x)
    maxima = jnp.max(blocks, axis=-1)
    block = jnp.argmax(maxima, axis=-1).astype(jnp.int32)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    index = block * BLOCK + jnp.argmax(inside, axis=-1).astype(jnp.int32)
    # A maximum may miss a NaN; a sum never does.
    has_nan = jnp.isnan(jnp.sum(x, axis=-1))
    return jnp.minimum(index, x.shape[1] - 1), jnp.max(maxima, axis=-1), has_nan


def blocks_of(x: Float32[Array, "rows width"]) -> Float32[Array, "rows blocks block"]:
    """Return the rows in blocks, padded with minus infinity."""
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)), constant_values=-jnp.inf)
    return padded.reshape(x.shape[0], -1, BLOCK)
