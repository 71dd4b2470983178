"""Keys and values in eight bits, with a scale a token and head."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# By dtype, the largest number that it holds, which a head's largest one becomes.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def quantize(values: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """`values` [..., head_dim] as `dtype`, and float32 scales [...] that restore them.

    Raises:
      ValueError: not one of the dtypes that keys and values are stored in with scales.
    """
    name = jnp.dtype(dtype).name
    if name not in LARGEST:
        raise ValueError(f"dtype={name!r} is not quantized with scales; give one of {(*LARGEST,)}")
    values = values.astype(jnp.float32)
    scales = jnp.abs(values).max(axis=-1) / LARGEST[name]
    scaled = values / jnp.where(scales == 0.0, 1.0, scales)[..., None]
    if name == "int8":
        scaled = jnp.round(scaled)
    return scaled.astype(dtype), scales
