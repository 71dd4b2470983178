"""Norms and gated activations in plain XLA, for every platform and sharding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "*rows width"], scale: Float[Array, " width"], *, eps: float, offset: float
) -> Float[Array, "*rows width"]:
    """See `api.rms_norm`."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * (scale.astype(jnp.float32) + offset)).astype(x.dtype)


def gated_silu(x: Float[Array, "rows 2 width"]) -> Float[Array, "rows width"]:
    """See `api.gated_silu`."""
    return jax.nn.silu(x[:, 0]) * x[:, 1]
