"""Rotary position embeddings in the rotate-half form of Hugging Face checkpoints."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Real

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


# Dtype -> its largest number, to which a head's largest absolute value is scaled.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def quantize(
    values: Float[Array, "*heads head_dim"], dtype: jax.typing.DTypeLike
) -> tuple[Real[Array, "*heads head_dim"], Float32[Array, "*heads"]]:
    """Quantize `values` [..., head_dim] to `dtype`; return them and their float32 scales [...].

    The values are approximately the quantized values times their scales. Raise ValueError
    unless `dtype` is one of `LARGEST`.
    """
    name = jnp.dtype(dtype).name
    if name not in LARGEST:
        raise ValueError(f"dtype={name!r} is not quantized with scales; pass one of {(*LARGEST,)}")
    values = values.astype(jnp.float32)
    scales = jnp.abs(values).max(axis=-1) / LARGEST[name]
    scaled = values / jnp.where(scales == 0.0, 1.0, scales)[..., None]
    if name == "int8":
        scaled = jnp.round(scaled)
    return scaled.astype(dtype), scales


# The rotated queries; the pages of keys and of values; their scales, None without 8-bit pages.
Written = tuple[
    Float[Array, "tokens q_heads head_dim"],
    Real[Array, "layers pages kv_heads page_size head_dim"],
    Real[Array, "layers pages kv_heads page_size head_dim"],
    Float32[Array, "layers pages kv_heads page_size"] | None,
    Float32[Array, "layers pages kv_heads page_size"] | None,
]
