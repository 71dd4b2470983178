"""Products on the CPU: C++ kernels (cpu.cc) that XLA calls on its own threads.

At the few rows of a decode batch, XLA's own product reads the weight more than once and reaches
half of this kernel's speed. The weight is not copied or rearranged. For groups of tokens, XLA
multiplies all tokens with every matrix.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxserve.kernels import build, dispatch
from jaxserve.kernels.matmul import xla

_SOURCE = Path(__file__).with_name("cpu.cc")


def matmul(
    x: Float[Array, "tokens in"],
    weight: Float[Array, " rows *columns"],
    *,
    transposed: bool,
    out_dtype: jax.typing.DTypeLike,
) -> Float[Array, " tokens *out"]:
    _check(x, weight, out_dtype)
    target = build.cpu_target(_SOURCE, "Matmul")
    out = weight.shape[:1] if transposed else weight.shape[1:]
    matrix = weight if transposed else weight.reshape(weight.shape[0], -1)
    is_computed = dispatch.computed_rows(x.shape[0])
    return _product(target, transposed, x, matrix, is_computed).reshape(x.shape[0], *out)


def grouped_matmul(
    x: Float[Array, "tokens in"],
    weight: Float[Array, " matrices in out"],
    sizes: Int32[Array, " matrices"],
) -> Float[Array, "tokens out"]:
    _check(x, weight, x.dtype)
    return _grouped(build.cpu_target(_SOURCE, "GroupedMatmul"), x, weight, sizes)


def _check(x: jax.Array, weight: jax.Array, out_dtype: jax.typing.DTypeLike) -> None:
    dispatch.require_cpu()
    dtypes = {str(x.dtype), str(weight.dtype), str(jnp.dtype(out_dtype))}
    if dtypes != {"float32"}:
        raise NotImplementedError(f"it serves float32 only, not {sorted(dtypes)}")
    if 0 in (*x.shape, *weight.shape):
        raise NotImplementedError(f"x{x.shape} or weight{weight.shape} is empty")


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _product(
    target: str,
    transposed: bool,
    x: Float[Array, "tokens in"],
    matrix: Float[Array, "rows columns"],
    is_computed: Bool[Array, " tokens"] | None,
) -> Float[Array, "tokens out"]:
    columns = matrix.shape[0 if transposed else 1]
    shape = jax.ShapeDtypeStruct((x.shape[0], columns), x.dtype)
    operands = x, matrix, dispatch.as_operand(is_computed)
    return jax.ffi.ffi_call(target, shape)(*operands, transposed=transposed)


@_product.defjvp
def _derivative(
    target: str,
    transposed: bool,
    values: tuple[jax.Array, jax.Array, Any],
    tangents: tuple[jax.Array, jax.Array, Any],  # which rows are computed has none
) -> tuple[jax.Array, jax.Array]:
    """Compute the tangent with XLA's product, which XLA can transpose."""
    (x, matrix, _), (dx, dmatrix, _) = values, tangents

    def times(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return xla.matmul(x, matrix, transposed=transposed, out_dtype=x.dtype)

    return _product(target, transposed, *values), times(dx, matrix) + times(x, dmatrix)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _grouped(
    target: str,
    x: Float[Array, "tokens in"],
    weight: Float[Array, " matrices in out"],
    sizes: Int32[Array, " matrices"],
) -> Float[Array, "tokens out"]:
    shape = jax.ShapeDtypeStruct((x.shape[0], weight.shape[2]), x.dtype)
    return jax.ffi.ffi_call(target, shape)(x, weight, sizes)


@_grouped.defjvp
def _grouped_derivative(
    target: str,
    values: tuple[jax.Array, jax.Array, jax.Array],
    tangents: tuple[jax.Array, jax.Array, Any],  # sizes have none
) -> tuple[jax.Array, jax.Array]:
    """Compute the tangent with XLA's product, which XLA can transpose."""
    (x, weight, sizes), (dx, dweight, _) = values, tangents
    tangent = xla.grouped_matmul(dx, weight, sizes) + xla.grouped_matmul(x, dweight, sizes)
    return _grouped(target, *values), tangent
