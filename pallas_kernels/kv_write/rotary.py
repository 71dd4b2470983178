"""Rotary position embeddings in the rotate-half form of Hugging Face checkpoints."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Cosines and sines, float32 [tokens, rotated / 2] each.
RopeTables = tuple[jax.Array, jax.Array]


def apply_rope(x: jax.Array, tables: RopeTables) -> jax.Array:
    """Rotate the first dimensions of `x` [tokens, ..., head_dim] in float32; returns x's dtype."""
    shape = (x.shape[0], *(1,) * (x.ndim - 2), -1)
    cos, sin = (table.reshape(shape) for table in tables)
    half = cos.shape[-1]
    wide = x[..., : 2 * half].astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half:]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    rotated = rotated.astype(x.dtype)
    if x.shape[-1] == 2 * half:
        return rotated
    return jnp.concatenate([rotated, x[..., 2 * half :]], axis=-1)
