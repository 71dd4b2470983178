"""Quantization of keys and values to 8 bits, with one scale per token and head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Real

# Dtype -> its largest number, to which a head's largest absolute value is scaled.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def quantize(
    values: Float[Array, "*heads head_dim"], dtype: jax.typing.DTypeLike
) -> tuple[Real[Array, "*heads head_dim"], Float32[Array, "*heads"]]:
    """Quantize `values` [..., head_dim] to `dtype`; return them and their float32 scales [...].

    The values are approximately the quantized values times their scales.

    Raises:
      ValueError: `dtype` is not one of `LARGEST`.
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
