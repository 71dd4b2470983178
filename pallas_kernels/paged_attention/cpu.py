"""Paged attention on the CPU: a C++ kernel (cpu.cc) that XLA calls on its own threads.

The call takes the whole cache as an operand and copies nothing.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Real

from pallas_kernels import build, dispatch
from pallas_kernels.cpu_targets import PAGES
from pallas_kernels.paged_attention.planner import Plan
from pallas_kernels.paged_attention.rows import Rows

_SOURCE = Path(__file__).with_name("cpu.cc")
_PAGES = ("float32",)
_SCALED_PAGES = ("int8", "float8_e4m3fn")


def paged_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k_pages: Real[Array, "layers pages kv_heads page_size head_dim"],
    v_pages: Real[Array, "layers pages kv_heads page_size head_dim"],
    layer: int | Int[Array, ""],
    rows: Rows,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    alibi_slopes: Float[Array, " q_heads"] | None,
    distance_bias: Float[Array, "q_heads distances"] | None,
    k_scales: Float32[Array, "layers pages kv_heads page_size"] | None,
    v_scales: Float32[Array, "layers pages kv_heads page_size"] | None,
    max_query_length: int | None,
    plan: Plan | None,
) -> Float[Array, "tokens q_heads head_dim"]:
    """See `api.paged_attention`. Tokens in no row get zeros.

    The bits of a row's output do not depend on the rest of the batch. A row that reaches outside
    the batch, the page table or the cache fails the call at run time with XLA's InvalidArgument.
    """
    platform = dispatch.target_platform()
    if platform != "cpu":
        raise NotImplementedError(f"it is compiled for the CPU, not for {platform}")
    if dispatch.is_partitioned():
        raise NotImplementedError("XLA cannot partition it over a mesh")
    _check_types(q, k_pages, v_pages, k_scales)
    if alibi_slopes is not None and distance_bias is not None:
        raise NotImplementedError("it adds ALiBi or a bias by distance, not both")
    del plan  # the kernel's threads divide the rows themselves
    if q.shape[2] % 8:
        raise NotImplementedError(f"head_dim must be a multiple of 8, not {q.shape[2]}")
    if sliding_window is not None and sliding_window < 1:
        raise NotImplementedError(f"a sliding window of {sliding_window} sees nothing")
    target = build.cpu_target(_SOURCE, "PagedAttention", PAGES[str(k_pages.dtype)])
    start = rows.query_start if max_query_length != 1 else jnp.arange(q.shape[0])
    nothing = jnp.zeros(0)
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(
        q,
        k_pages,
        v_pages,
        nothing if k_scales is None else k_scales,
        nothing if v_scales is None else v_scales,
        jnp.asarray(layer, jnp.int32),
        *(
            x.astype(jnp.int32)
            for x in (start, rows.query_length, rows.first_position, rows.context_length)
        ),
        rows.page_table.astype(jnp.int32),
        _bias(alibi_slopes, distance_bias, nothing),
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0.0),
        window=np.int32(sliding_window or 0),
    )


def _bias(
    alibi_slopes: Float[Array, " q_heads"] | None,
    distance_bias: Float[Array, "q_heads distances"] | None,
    nothing: Float32[Array, " none"],
) -> Float32[Array, " numbers"]:
    """Return one operand for both: slopes, one a head, or biases, two or more a head."""
    if alibi_slopes is not None:
        return alibi_slopes.astype(jnp.float32)
    if distance_bias is None:
        return nothing
    if distance_bias.shape[1] == 1:
        distance_bias = jnp.repeat(distance_bias, 2, axis=1)
    return distance_bias.astype(jnp.float32).reshape(-1)


def _check_types(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, k_scales: jax.Array | None
) -> None:
    pages = _PAGES if k_scales is None else _SCALED_PAGES
    if (
        str(q.dtype) != "float32"
        or k_pages.dtype != v_pages.dtype
        or str(k_pages.dtype) not in pages
    ):
        raise NotImplementedError(
            f"it serves float32 queries with pages in float32, or with scales in {_SCALED_PAGES}, "
            f"not {q.dtype} with {k_pages.dtype} and {v_pages.dtype}"
            + ("" if k_scales is None else " and scales")
        )
