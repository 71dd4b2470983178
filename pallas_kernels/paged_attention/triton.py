"""Paged attention on NVIDIA GPUs from sm_80 on: Pallas kernels compiled by Triton.

Three kernels (`triton_kernels`), *tile*, *split* and *merge*, share a batch by the work items of
`planner.plan`. They view the whole cache as [layers * pages, ...] and copy none of it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Real

from pallas_kernels import dispatch, gpu
from pallas_kernels.paged_attention.planner import Plan
from pallas_kernels.paged_attention.rows import Rows
from pallas_kernels.paged_attention.triton_kernels import (
    KernelRows,
    Kernels,
    Operands,
    merge_kernel,
    split_kernel,
    tile_kernel,
)

_DTYPES = ("float32", "bfloat16", "float16")
_PAGE_DTYPES = (*_DTYPES, "float8_e4m3fn", "int8")
_MAX_WIDTH = 256


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
    interpret: bool = False,
) -> Float[Array, "tokens q_heads head_dim"]:
    """See `api.paged_attention`. The output takes the place of the queries, where it can.

    Args:
      interpret: run in the interpreter, on any platform, for tests; slow.
    """
    if not interpret:
        gpu.require_triton()
    if distance_bias is not None:
        raise NotImplementedError("it has no bias by distance")
    if plan is None:
        raise NotImplementedError("it needs a plan of the batch; pass plan=")
    _check_types(q, k_pages, sliding_window)
    gpu.require_addressable(k_pages, v_pages)
    layers, num_pages, kv_heads, page_size, head_dim = k_pages.shape
    tiling = plan.tiling
    tiling.check_heads(q.shape[1], kv_heads)

    def flat(pages: jax.Array | None) -> jax.Array | None:
        return None if pages is None else pages.reshape(layers * num_pages, *pages.shape[2:])

    operands = Operands(
        counts=plan.counts,
        layer=jnp.asarray(layer, jnp.int32).reshape(1),
        rows=_kernel_rows(rows, is_decode=max_query_length == 1),
        k=flat(k_pages),
        v=flat(v_pages),
        k_scales=flat(k_scales),
        v_scales=flat(v_scales),
        slopes=None if alibi_slopes is None else alibi_slopes.astype(jnp.float32),
    )
    launches = tiling.launches_for(
        q.dtype,
        has_alibi=alibi_slopes is not None,
        has_window=sliding_window is not None,
        has_cap=soft_cap is not None,
    )
    kernels = Kernels(
        tiling=tiling,
        block_keys=launches.block_keys,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        kv_heads=kv_heads,
        head_dim=head_dim,
        num_pages=num_pages,
        page_size=page_size,
        interpret=interpret,
    )
    out = q
    if len(plan.tiles):
        (out,) = kernels.call(tile_kernel, plan.tiles, operands, out, launches.tile)
    if len(plan.splits):
        shape = (plan.num_partials, kv_heads)
        out, values, sums = kernels.call(
            *(split_kernel, plan.splits, operands, out, launches.split),
            *((*shape, tiling.split_rows, head_dim), (*shape, 2, tiling.split_rows)),
        )
        partials = (operands.counts, operands.rows, values, sums)
        (out,) = kernels.call(merge_kernel, plan.merges, partials, out, launches.merge)
    return out


def merge(
    plan: Plan,
    rows: Rows,
    values: Float32[Array, "partials kv_heads head_dim split_rows"],
    sums: Float32[Array, "partials kv_heads 2 split_rows"],
    out: Float[Array, "tokens q_heads head_dim"],
    *,
    is_decode: bool,
    interpret: bool,
) -> Float[Array, "tokens q_heads head_dim"]:
    """Return `out` with the partial results of another split kernel merged.

    Args:
      sums: the maxima, to base 2 and whole numbers, and the sums.
    """
    tiling = plan.tiling
    kernels = Kernels(
        tiling=tiling,
        kv_heads=values.shape[1],
        head_dim=values.shape[2],
        interpret=interpret,
        is_turned=True,
    )
    partials = (plan.counts, _kernel_rows(rows, is_decode=is_decode), values, sums)
    (merged,) = kernels.call(merge_kernel, plan.merges, partials, out, tiling.launches.merge)
    return merged


def _kernel_rows(rows: Rows, *, is_decode: bool) -> KernelRows:
    return KernelRows(
        query_start=None if is_decode else rows.query_start,
        query_length=rows.query_length,
        first_position=rows.first_position,
        context_length=rows.context_length,
        page_table=rows.page_table,
    )


def _check_types(q: jax.Array, pages: jax.Array, sliding_window: int | None) -> None:
    if str(q.dtype) not in _DTYPES or str(pages.dtype) not in _PAGE_DTYPES:
        raise NotImplementedError(
            f"it serves queries in one of {_DTYPES} and pages in one of {_PAGE_DTYPES}, not "
            f"{q.dtype} and {pages.dtype}"
        )
    capability = dispatch.compute_capability()
    if str(pages.dtype).startswith("float8") and capability is not None and capability < (8, 9):
        raise NotImplementedError(
            f"float8 pages need sm_89 or newer, not compute capability {capability}"
        )
    if q.shape[2] > _MAX_WIDTH:
        raise NotImplementedError(f"it serves head_dim up to {_MAX_WIDTH}, not {q.shape[2]}")
    if sliding_window is not None and sliding_window < 1:
        raise NotImplementedError(f"a sliding window of {sliding_window} sees nothing")
