"""Rotation and writes on the CPU: a C++ kernel (cpu.cc) that XLA calls on its own threads."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Real

from jaxserve.kernels import build, dispatch
from jaxserve.kernels.kv_write.operands import LARGEST, RopeTables, Written

_SOURCE = Path(__file__).with_name("cpu.cc")


def rotate_and_write(
    qkv: Float[Array, "tokens kv_heads columns head_dim"],
    tables: RopeTables | None,
    k_pages: Real[Array, "layers pages kv_heads page_size head_dim"],
    v_pages: Real[Array, "layers pages kv_heads page_size head_dim"],
    layer: int | Int[Array, ""],
    page: Int[Array, " tokens"],
    offset: Int[Array, " tokens"],
    *,
    k_scales: Float32[Array, "layers pages kv_heads page_size"] | None,
    v_scales: Float32[Array, "layers pages kv_heads page_size"] | None,
) -> Written:
    """Implement `api.rotate_and_write`. A token whose page is out of range writes nothing."""
    dispatch.require_cpu()
    allowed = ("float32", "bfloat16") if k_scales is None else tuple(LARGEST)
    if qkv.dtype != jnp.float32 or not {str(k_pages.dtype), str(v_pages.dtype)} <= {*allowed}:
        raise NotImplementedError(
            f"it serves float32 with pages in float32 or bfloat16, or with scales in "
            f"{tuple(LARGEST)}, not {qkv.dtype} with {k_pages.dtype} and {v_pages.dtype}"
        )
    if k_pages.dtype != v_pages.dtype or qkv.size == 0:
        raise NotImplementedError("keys and values differ in their dtypes, or there are none")
    target = build.cpu_target(_SOURCE, "RotateAndWrite")
    tokens, kv_heads, columns, head_dim = qkv.shape
    none = np.zeros((tokens, 0), np.float32)
    cos, sin = (none, none) if tables is None else tables
    scales = [np.zeros(0, np.float32) if x is None else x for x in (k_scales, v_scales)]
    written = (k_pages, v_pages, *scales)
    q_shape = (tokens, kv_heads * (columns - 2), head_dim)
    shapes = [jax.ShapeDtypeStruct(q_shape, jnp.float32)]
    shapes += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written]
    num_aliased = 2 if k_scales is None else 4
    q, *out = jax.ffi.ffi_call(
        target, shapes, input_output_aliases={6 + i: 1 + i for i in range(num_aliased)}
    )(
        qkv,
        cos,
        sin,
        jnp.asarray(layer, jnp.int32),
        page.astype(jnp.int32),
        offset.astype(jnp.int32),
        *written,
    )
    if k_scales is None:
        return q, out[0], out[1], None, None
    return q, out[0], out[1], out[2], out[3]
