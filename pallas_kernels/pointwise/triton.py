"""Operations on each row on NVIDIA GPUs from sm_80 on: Pallas kernels compiled by Triton.

A program takes a row, which is in the device's cache if a product has just written it. The row's
width decides the order of its sums; in XLA it may depend on the number of rows. `interpret` runs a
kernel in the interpreter, on any platform, for tests; it is slow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxserve.kernels import dispatch, gpu
from jaxserve.kernels.pointwise import xla

# Elements that a program reads at a time, for rows as wide as a vocabulary.
_BLOCK = 4096
# The widest row that a norm keeps in registers, and the numbers of a warp.
_MAX_WIDTH = 32768
_WIDTH_OF_WARP = 512


def rms_norm(
    x: Float[Array, "*rows width"],
    scale: Float[Array, " width"],
    *,
    eps: float,
    offset: float,
    interpret: bool = False,
) -> Float[Array, "*rows width"]:
    def kernel(x_ref: Any, scale_ref: Any, out_ref: Any) -> None:
        row, at, mask = _place(x_ref)
        wide = triton.load(x_ref.at[row, at], mask=mask, other=0.0).astype(jnp.float32)
        factor = lax.rsqrt(jnp.sum(wide * wide) / x_ref.shape[1] + eps)
        scale = triton.load(scale_ref.at[at], mask=mask, other=0.0).astype(jnp.float32)
        out = wide * factor * (scale + offset)
        triton.store(out_ref.at[row, at], out.astype(out_ref.dtype), mask=mask)

    return _norm(kernel, "rms_norm", x, scale, interpret=interpret)


def layer_norm(
    x: Float[Array, "*rows width"],
    scale: Float[Array, " width"],
    bias: Float[Array, " width"],
    *,
    eps: float,
    interpret: bool = False,
) -> Float[Array, "*rows width"]:
    def kernel(x_ref: Any, scale_ref: Any, bias_ref: Any, out_ref: Any) -> None:
        row, at, mask = _place(x_ref)
        wide = triton.load(x_ref.at[row, at], mask=mask, other=0.0).astype(jnp.float32)
        wide = jnp.where(mask, wide - jnp.sum(wide) / x_ref.shape[1], 0.0)
        wide = wide * lax.rsqrt(jnp.sum(wide * wide) / x_ref.shape[1] + eps)
        scale, bias = (
            triton.load(ref.at[at], mask=mask, other=0.0).astype(jnp.float32)
            for ref in (scale_ref, bias_ref)
        )
        out = wide * scale + bias
        triton.store(out_ref.at[row, at], out.astype(out_ref.dtype), mask=mask)

    return _norm(kernel, "layer_norm", x, scale, bias, interpret=interpret)


def log_sum_exp(
    x: Float32[Array, "rows width"], *, interpret: bool = False
) -> Float32[Array, " rows"]:
    _check(x, interpret=interpret)
    if x.dtype != jnp.float32:
        raise NotImplementedError(f"it serves float32, not {x.dtype}")
    return _log_sum_exp(interpret, x)


def row_maximum(
    x: Float32[Array, "rows width"], *, interpret: bool = False
) -> tuple[Int32[Array, " rows"], Float32[Array, " rows"], Bool[Array, " rows"]]:
    _check(x, interpret=interpret)
    rows = x.shape[:1]
    index, value, has_nan = pl.pallas_call(
        partial(_maximum_kernel, x.shape[1]),
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


def _check(*arrays: jax.Array, interpret: bool) -> None:
    if not interpret:
        gpu.require_triton()
        dispatch.require_whole()
    if any(x.size == 0 for x in arrays):
        raise NotImplementedError(f"x{arrays[0].shape} is empty")
    gpu.require_addressable(*arrays)


def _norm(
    kernel: Callable[..., None],
    name: str,
    x: Float[Array, "*rows width"],
    *parameters: Float[Array, " width"],
    interpret: bool,
) -> Float[Array, "*rows width"]:
    _check(x, *parameters, interpret=interpret)
    width = x.shape[-1]
    if width > _MAX_WIDTH:
        raise NotImplementedError(f"it serves rows of up to {_MAX_WIDTH} numbers, not {width}")
    flat = x.reshape(-1, width)
    warps = min(max(gpu.power_of_two(width) // _WIDTH_OF_WARP, 1), 16)
    out = pl.pallas_call(
        kernel,
        grid=flat.shape[:1],
        out_shape=jax.ShapeDtypeStruct(flat.shape, x.dtype),
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(flat, *parameters)
    return out.reshape(x.shape)


def _place(x_ref: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the program's row, indices up to a power of two, and which of them exist."""
    width = x_ref.shape[1]
    at = jnp.arange(gpu.power_of_two(width), dtype=jnp.int32)
    return pl.program_id(0), at, at < width


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _log_sum_exp(interpret: bool, x: Float32[Array, "rows width"]) -> Float32[Array, " rows"]:
    return pl.pallas_call(
        partial(_log_sum_exp_kernel, x.shape[1]),
        grid=x.shape[:1],
        out_shape=jax.ShapeDtypeStruct(x.shape[:1], x.dtype),
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
        name="log_sum_exp",
    )(x)


@_log_sum_exp.defjvp
def _log_sum_exp_derivative(
    interpret: bool, values: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    return _log_sum_exp(interpret, *values), jax.jvp(xla.log_sum_exp, values, tangents)[1]


def _log_sum_exp_kernel(
    width: int,
    x_ref: Any,  # float32 [rows, width]
    out_ref: Any,  # float32 [rows]
) -> None:
    row = pl.program_id(0)
    lane = jnp.arange(_BLOCK, dtype=jnp.int32)
    blocks = -(-width // _BLOCK)

    def load(block: jax.Array) -> jax.Array:
        at = block * _BLOCK + lane
        return triton.load(x_ref.at[row, at], mask=at < width, other=-jnp.inf)

    def larger(block: jax.Array, best: jax.Array) -> jax.Array:
        return jnp.maximum(best, load(block))

    largest = jnp.max(lax.fori_loop(0, blocks, larger, jnp.full((_BLOCK,), -jnp.inf, jnp.float32)))
    # Infinity minus infinity would be NaN.
    largest = jnp.where(jnp.abs(largest) < jnp.inf, largest, 0.0)

    def add(block: jax.Array, total: jax.Array) -> jax.Array:
        return total + jnp.exp(load(block) - largest)

    total = lax.fori_loop(0, blocks, add, jnp.zeros((_BLOCK,), jnp.float32))
    out_ref[row] = jnp.log(jnp.sum(total)) + largest


def _maximum_kernel(
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
