"""The product on the CPU: a C++ kernel (cpu.cc) that XLA calls on its own threads.

At the few rows of a decode batch, XLA's own product reads the weight more than once and reaches
half of this kernel's speed. The weight is not copied or rearranged.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import build, dispatch
from pallas_kernels.matmul import xla

_SOURCE = Path(__file__).with_name("cpu.cc")


def matmul(
    x: Float[Array, "tokens in"],
    weight: Float[Array, " rows *columns"],
    *,
    transposed: bool,
    out_dtype: jax.typing.DTypeLike,
) -> Float[Array, " tokens *out"]:
    """See `api.matmul`."""
    platform = dispatch.target_platform()
    if platform != "cpu":
        raise NotImplementedError(f"it is compiled for the CPU, not for {platform}")
    dtypes = {str(x.dtype), str(weight.dtype), str(jnp.dtype(out_dtype))}
    if dtypes != {"float32"}:
        raise NotImplementedError(f"it serves float32 only, not {sorted(dtypes)}")
    if dispatch.is_partitioned():
        raise NotImplementedError("XLA cannot partition it over a mesh")
    if 0 in (*x.shape, *weight.shape):
        raise NotImplementedError(f"x{x.shape} or weight{weight.shape} is empty")
    target = build.cpu_target(_SOURCE, "Matmul")
    out = weight.shape[:1] if transposed else weight.shape[1:]
    matrix = weight if transposed else weight.reshape(weight.shape[0], -1)
    return _product(target, transposed, x, matrix).reshape(x.shape[0], *out)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _product(
    target: str,
    transposed: bool,
    x: Float[Array, "tokens in"],
    matrix: Float[Array, "rows columns"],
) -> Float[Array, "tokens out"]:
    columns = matrix.shape[0 if transposed else 1]
    shape = jax.ShapeDtypeStruct((x.shape[0], columns), x.dtype)
    return jax.ffi.ffi_call(target, shape)(x, matrix, transposed=transposed)


@_product.defjvp
def _derivative(
    target: str,
    transposed: bool,
    values: tuple[jax.Array, jax.Array],
    tangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Compute the tangent with XLA's product, which XLA can transpose."""
    (x, matrix), (dx, dmatrix) = values, tangents

    def times(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return xla.matmul(x, matrix, transposed=transposed, out_dtype=x.dtype)

    return _product(target, transposed, x, matrix), times(dx, matrix) + times(x, dmatrix)
