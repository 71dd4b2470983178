"""Paged attention on the CPU: a C++ kernel (cpu.cc) called by XLA, on XLA's own threads.

The pages are read where they lie: the call takes the whole cache as an operand and copies nothing.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import build, dispatch
from pallas_kernels.paged_attention.planner import Plan
from pallas_kernels.paged_attention.rows import Rows

_SOURCE = Path(__file__).with_name("cpu.cc")


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    layer: int | jax.Array,
    rows: Rows,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    alibi_slopes: jax.Array | None,
    k_scales: jax.Array | None,
    v_scales: jax.Array | None,
    max_query_length: int | None,
    plan: Plan | None,
) -> jax.Array:
    """See `api.paged_attention`. Tokens of no row get zeros.

    The bits of a row's output do not depend on the rest of the batch. Rows that reach outside the
    batch, the page table or the cache fail when the call runs, with XLA's InvalidArgument.
    """
    platform = dispatch.target_platform()
    if platform != "cpu":
        raise NotImplementedError(f"compiled for the CPU, not for {platform}")
    if dispatch.is_partitioned():
        raise NotImplementedError("XLA cannot partition it over a mesh")
    dtypes = {str(x.dtype) for x in (q, k_pages, v_pages)}
    if dtypes != {"float32"}:
        raise NotImplementedError(f"float32 queries and pages only, not {sorted(dtypes)}")
    del k_scales, v_scales, plan  # scaled pages are not float32, and threads share the rows
    if q.shape[2] % 8:
        raise NotImplementedError(f"head_dim must be a multiple of 8, not {q.shape[2]}")
    if sliding_window is not None and sliding_window < 1:
        raise NotImplementedError(f"a sliding window of {sliding_window} sees nothing")
    target = build.cpu_target(_SOURCE, "PagedAttention")
    start = rows.query_start if max_query_length != 1 else jnp.arange(q.shape[0])
    if alibi_slopes is None:
        alibi_slopes = jnp.zeros(0)
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(
        q,
        k_pages,
        v_pages,
        jnp.asarray(layer, jnp.int32),
        *(
            x.astype(jnp.int32)
            for x in (start, rows.query_length, rows.first_position, rows.context_length)
        ),
        rows.page_table.astype(jnp.int32),
        alibi_slopes.astype(jnp.float32),
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0.0),
        window=np.int32(sliding_window or 0),
    )
