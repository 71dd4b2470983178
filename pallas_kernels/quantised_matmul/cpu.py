"""The product with a packed weight on the CPU: a C++ kernel (cpu.cc) on XLA's own threads."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from jaxserve.kernels import build, dispatch
from jaxserve.kernels.quantised_matmul.packing import PackedMatrix, Rounding

SOURCE = Path(__file__).with_name("cpu.cc")
SYMBOL = "QuantisedMatmul"


def quantised_matmul(
    x: Float[Array, "tokens in"],
    codes: UInt8[Array, ...],  # the weight's, for the log
    weight: PackedMatrix,
    *,
    rounds_activations: Rounding | None,
    out_dtype: jax.typing.DTypeLike,
) -> Float[Array, "tokens out"]:
    """Implement `api.quantised_matmul`, with the columns of all leading axes in one axis."""
    dispatch.require_cpu()
    if weight.is_float:
        raise NotImplementedError("it multiplies integers")
    if rounds_activations != "groups":
        raise NotImplementedError("it rounds activations to eight bits, by groups")
    if 0 in (*x.shape, *codes.shape):
        raise NotImplementedError(f"x{x.shape} or codes{codes.shape} is empty")
    out = call(build.cpu_target(SOURCE, SYMBOL), x, weight)
    return out.astype(out_dtype)


def call(
    target: str, x: Float[Array, "tokens in"], weight: PackedMatrix
) -> Float[Array, "tokens out"]:
    columns = weight.channels.size
    none = np.zeros(0, np.float32)
    least = weight.minima if weight.zeros is None else weight.zeros
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((x.shape[0], columns), jnp.float32))(
        x.astype(jnp.float32),
        weight.codes,
        weight.channels,
        none if weight.scales is None else weight.scales,
        none if least is None else least,
        dispatch.as_operand(dispatch.computed_rows(x.shape[0])),
        bits=np.int64(weight.bits),
        offset=np.int64(weight.offset),
        group=np.int64(weight.group),
    )
