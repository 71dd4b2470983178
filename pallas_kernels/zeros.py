"""Arrays of zeros whose memory is allocated at the first write."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jaxserve.kernels import build, dispatch

_SOURCE = Path(__file__).with_suffix(".cc")


def zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Shaped[Array, ...]:
    """Return `jnp.zeros(shape, dtype)`; call it under `jax.jit`, which returns the array itself.

    On a CPU the operating system provides the memory page by page, at the first write, so that a
    large array costs nothing before it is used. Where XLA partitions the array over a mesh, on
    other platforms, and without a C++ compiler (logged as a warning), it is `jnp.zeros`.
    """
    if dispatch.target_platform() != "cpu" or dispatch.is_partitioned():
        return jnp.zeros(shape, dtype)
    try:
        target = build.cpu_target(_SOURCE, "Zeros")
    except NotImplementedError:
        return jnp.zeros(shape, dtype)
    # The side effect prevents XLA from merging two equal arrays into one and copying it.
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(shape, dtype), has_side_effect=True)()
