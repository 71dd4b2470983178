"""The maximum of each row on NVIDIA GPUs from sm_80 on: a Pallas kernel compiled by Triton.

A program takes a row, which is in the device's cache if a product has just written it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels import dispatch, gpu

_BLOCK = 4096


def row_maximum(
    x: Float32[Array, "rows width"], *, interpret: bool = False
) -> tuple[Int32[Array, " rows"], Float32[Array, " rows"], Bool[Array, " rows"]]:
    """See `api.row_maximum`.

    Args:
      interpret: run in the interpreter, on any platform, for tests; slow.
    """
    if not interpret:
        gpu.require_triton()
        if dispatch.is_partitioned():
            raise NotImplementedError("XLA cannot partition it over a mesh")
    if 0 in x.shape:
        raise NotImplementedError(f"x{x.shape} is empty")
    gpu.require_addressable(x)
    rows = x.shape[:1]
    index, value, has_nan = pl.pallas_call(
        partial(_kernel, x.shape[1]),
        grid=rows,
        out_shape=(
            jax.ShapeDtypeStruct(rows, jnp.int32),
            jax.ShapeDtypeStruct(rows, jnp.float32),
            jax.ShapeDtypeStruct(rows, jnp.int32),
        ),
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
        name="row_maximum",
    )(x)
    return index, value, has_nan != 0


def _kernel(
    width: int,
    x_ref: Any,  # float32 [rows, width]
    index_ref: Any,  # int32 [rows]
    value_ref: Any,  # float32 [rows]
    has_nan_ref: Any,  # int32 [rows]
) -> None:
    row = pl.program_id(0)
    lane = jnp.arange(_BLOCK, dtype=jnp.int32)

    def one_block(block: jax.Array, best: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        value, place, has_nan = best
        at = block * _BLOCK + lane
        x = triton.load(x_ref.at[row, at], mask=at < width, other=-jnp.inf)
        is_nan = x != x
        is_larger = (x > value) & ~is_nan
        return (
            jnp.where(is_larger, x, value),
            jnp.where(is_larger, at, place),
            jnp.where(is_nan, 1, has_nan),
        )

    start = (jnp.full((_BLOCK,), -jnp.inf, jnp.float32), lane, jnp.zeros((_BLOCK,), jnp.int32))
    value, place, has_nan = lax.fori_loop(0, -(-width // _BLOCK), one_block, start)
    largest = jnp.max(value)
    first = jnp.min(jnp.where(value == largest, place, width - 1))
    index_ref[row] = jnp.minimum(first, width - 1)
    value_ref[row] = largest
    has_nan_ref[row] = jnp.max(has_nan)
