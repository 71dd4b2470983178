"""The product on the CPU: a C++ kernel (cpu.cc) called by XLA, on XLA's own threads.

XLA's own product reaches half of this one's speed at the few rows of a decode batch, where it reads
the weight more than once. The weight is read where it lies; nothing is copied or rearranged.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels import build

_SOURCE = Path(__file__).with_name("cpu.cc")


def matmul(
    x: jax.Array, weight: jax.Array, *, transposed: bool, out_dtype: jax.typing.DTypeLike
) -> jax.Array:
    """See `api.matmul`."""
    if jax.default_backend() != "cpu":
        raise NotImplementedError(f"compiled for the CPU, not for {jax.default_backend()}")
    dtypes = {str(x.dtype), str(weight.dtype), str(jnp.dtype(out_dtype))}
    if dtypes != {"float32"}:
        raise NotImplementedError(f"float32 only, not {sorted(dtypes)}")
    if not jax.sharding.get_abstract_mesh().empty:
        raise NotImplementedError("XLA cannot partition it over a mesh")
    if 0 in (*x.shape, *weight.shape):
        raise NotImplementedError(f"empty: x{x.shape} and weight{weight.shape}")
    target = build.cpu_target(_SOURCE, "Matmul")
    shape = (x.shape[0], weight.shape[0 if transposed else 1])
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(shape, x.dtype))
    return call(x, weight, transposed=transposed)
