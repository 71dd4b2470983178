"""Operations on each row on the CPU: C++ kernels (cpu.cc) on XLA's own threads.

XLA splits each into several operations, most of them on one thread, and the order in which it adds
up a row depends on the number of rows.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from jaxserve.kernels import build, dispatch
from jaxserve.kernels.pointwise import xla

SOURCE = Path(__file__).with_name("cpu.cc")


def rms_norm(
    x: Float[Array, "*rows width"], scale: Float[Array, " width"], *, eps: float, offset: float
) -> Float[Array, "*rows width"]:
    _check(x, scale)
    target = build.cpu_target(SOURCE, "RmsNorm")
    return norm_by(target, eps, offset, x.reshape(-1, x.shape[-1]), scale).reshape(x.shape)


def layer_norm(
    x: Float[Array, "*rows width"],
    scale: Float[Array, " width"],
    bias: Float[Array, " width"],
    *,
    eps: float,
) -> Float[Array, "*rows width"]:
    _check(x, scale, bias)
    target = build.cpu_target(SOURCE, "LayerNorm")
    return layer_norm_by(target, eps, x.reshape(-1, x.shape[-1]), scale, bias).reshape(x.shape)


def log_sum_exp(x: Float32[Array, "rows width"]) -> Float32[Array, " rows"]:
    _check(x)
    return log_sum_exp_by(build.cpu_target(SOURCE, "LogSumExp"), x)


def gated_silu(x: Float[Array, "rows 2 width"]) -> Float[Array, "rows width"]:
    _check(x)
    return gate_by(build.cpu_target(SOURCE, "GatedSilu"), x)


def _check(*arrays: jax.Array) -> None:
    dispatch.require_cpu()
    if any(x.dtype != jnp.float32 or x.size == 0 for x in arrays):
        raise NotImplementedError(
            f"it serves float32 only, and no empty arrays, not {[str(x.aval) for x in arrays]}"
        )


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def norm_by(
    target: str,
    eps: float,
    offset: float,
    x: Float[Array, "rows width"],
    scale: Float[Array, " width"],
) -> Float[Array, "rows width"]:
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(x.shape, x.dtype))(
        x, scale, eps=np.float32(eps), offset=np.float32(offset)
    )


@norm_by.defjvp
def _norm_derivative(
    target: str,
    eps: float,
    offset: float,
    values: tuple[jax.Array, ...],
    tangents: tuple[jax.Array, ...],
) -> tuple[jax.Array, jax.Array]:
    _, tangent = jax.jvp(partial(xla.rms_norm, eps=eps, offset=offset), values, tangents)
    return norm_by(target, eps, offset, *values), tangent


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def layer_norm_by(
    target: str,
    eps: float,
    x: Float[Array, "rows width"],
    scale: Float[Array, " width"],
    bias: Float[Array, " width"],
) -> Float[Array, "rows width"]:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call(target, shape)(x, scale, bias, eps=np.float32(eps))


@layer_norm_by.defjvp
def _layer_norm_derivative(
    target: str, eps: float, values: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    _, tangent = jax.jvp(partial(xla.layer_norm, eps=eps), values, tangents)
    return layer_norm_by(target, eps, *values), tangent


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def log_sum_exp_by(target: str, x: Float32[Array, "rows width"]) -> Float32[Array, " rows"]:
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(x.shape[:1], x.dtype))(x)


@log_sum_exp_by.defjvp
def _log_sum_exp_derivative(
    target: str, values: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    return log_sum_exp_by(target, *values), jax.jvp(xla.log_sum_exp, values, tangents)[1]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def gate_by(target: str, x: Float[Array, "rows 2 width"]) -> Float[Array, "rows width"]:
    shape = jax.ShapeDtypeStruct((x.shape[0], x.shape[2]), x.dtype)
    return jax.ffi.ffi_call(target, shape)(x)


@gate_by.defjvp
def _gate_derivative(
    target: str, values: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    return gate_by(target, *values), jax.jvp(xla.gated_silu, values, tangents)[1]
