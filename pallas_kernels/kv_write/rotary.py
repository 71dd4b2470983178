"""Rotary position embeddings in the rotate-half form of Hugging Face checkpoints."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

# Cosines and sines, float32 [tokens, rotated / 2] each.
RopeTables = tuple[Float32[Array, "tokens half"], Float32[Array, "tokens half"]]


def apply_rope(
    x: Float[Array, "tokens *heads head_dim"], tables: RopeTables
) -> Float[Array, "tokens *heads head_dim"]:
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
