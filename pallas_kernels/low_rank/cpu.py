"""Low-rank changes on the CPU: a C++ kernel (cpu.cc) that XLA calls on its own threads.

XLA needs six operations per weight for grouped products, which cost more than the products.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.kernels import build, dispatch
from jaxserve.kernels.low_rank import xla

_SOURCE = Path(__file__).with_name("cpu.cc")


def add_low_rank(
    out: Float[Array, "tokens out"],
    x: Float[Array, "tokens in"],
    a: Float[Array, " adapters in ranks"],
    b: Float[Array, "adapters rank out"],
    scale: Float32[Array, " adapters"],
    adapter: Int32[Array, " tokens"],
    *,
    spans: tuple[tuple[int, int], ...],
) -> Float[Array, "tokens out"]:
    dispatch.require_cpu()
    dtypes = [str(each.dtype) for each in (out, x, a, b)]
    if dtypes[:2] != ["float32"] * 2 or dtypes[2:] not in (["float32"] * 2, ["bfloat16"] * 2):
        raise NotImplementedError(
            f"it serves float32 with adapters in float32 or bfloat16, not {dtypes}"
        )
    if 0 in (*out.shape, *a.shape):
        raise NotImplementedError(f"out{out.shape} or a{a.shape} is empty")
    target = build.cpu_target(_SOURCE, "AddLowRank")
    return _added(target, spans, adapter, out, x, a, b, scale)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _added(
    target: str,
    spans: tuple[tuple[int, int], ...],
    adapter: Int32[Array, " tokens"],
    out: Float32[Array, "tokens out"],
    x: Float32[Array, "tokens in"],
    a: Float[Array, " adapters in ranks"],
    b: Float[Array, "adapters rank out"],
    scale: Float32[Array, " adapters"],
) -> Float32[Array, "tokens out"]:
    shape = jax.ShapeDtypeStruct(out.shape, out.dtype)
    call = jax.ffi.ffi_call(target, shape, input_output_aliases={0: 0})
    return call(out, x, a, b, scale, adapter, spans=np.array(spans, np.int64).ravel())


@_added.defjvp
def _derivative(
    target: str,
    spans: tuple[tuple[int, int], ...],
    values: tuple[Any, ...],
    tangents: tuple[Any, ...],
) -> tuple[jax.Array, jax.Array]:
    """Compute the tangent with XLA's products, which XLA can transpose."""
    adapter, *arrays = values
    function: Any = partial(xla.add_low_rank, adapter=adapter, spans=spans)
    _, tangent = jax.jvp(function, tuple(arrays), tuple(tangents[1:]))
    return _added(target, spans, *values), tangent
