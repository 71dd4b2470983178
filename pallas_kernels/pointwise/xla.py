"""Operations on each row in plain XLA, for every platform and sharding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32


def rms_norm(
    x: Float[Array, "*rows width"], scale: Float[Array, " width"], *, eps: float, offset: float
) -> Float[Array, "*rows width"]:
    """See `api.rms_norm`."""
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
    """See `api.layer_norm`."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def log_sum_exp(x: Float32[Array, "rows width"]) -> Float32[Array, " rows"]:
    """See `api.log_sum_exp`."""
    return jax.nn.logsumexp(x, axis=-1)


def gated_silu(x: Float[Array, "rows 2 width"]) -> Float[Array, "rows width"]:
    """See `api.gated_silu`."""
    return jax.nn.silu(x[:, 0]) * x[:, 1]
