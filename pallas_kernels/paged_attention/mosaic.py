"""Paged attention on Hopper GPUs: a Mosaic GPU kernel for tiles, Triton's for rows of few queries.

The two share the batch by `planner.plan`. The Mosaic kernel was never run on a GPU. It is compiled
for one and run in JAX's interpreter, so it is used only when it is requested by name.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Real

from pallas_kernels import dispatch
from pallas_kernels.paged_attention import triton
from pallas_kernels.paged_attention.planner import Plan
from pallas_kernels.paged_attention.rows import Rows

_MIN_JAX = (0, 11)
_DTYPES = ("bfloat16", "float16")
_HEAD_DIMS = (64, 128)
# Query heads per KV head; a warpgroup's products have 64 rows.
_MAX_GROUP = 64
_MIN_PAGE = 16


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
    """See `api.paged_attention`. Tokens in no row get zeros.

    Args:
      interpret: run in the interpreter with race detection, on any platform, for tests; very slow.
    """
    if jax.__version_info__ < _MIN_JAX:
        raise NotImplementedError(f"it needs JAX 0.11 or newer, not {jax.__version__}")
    if not interpret:
        _check_platform()
    if max_query_length == 1:
        raise NotImplementedError("it has a kernel for tiles of queries, and none for decoding")
    if plan is None:
        raise NotImplementedError("it needs a plan of the batch; pass plan=")
    if alibi_slopes is not None:
        raise NotImplementedError("it does not support ALiBi")
    if distance_bias is not None:
        raise NotImplementedError("it has no bias by distance")
    if scale <= 0.0:
        raise NotImplementedError(f"it needs a positive scale of the logits, not {scale}")
    _check_types(q, k_pages, sliding_window)
    _check_page_size(k_pages, plan)
    tiling = plan.tiling
    assert tiling.warpgroups is not None
    tiling.check_heads(q.shape[1], k_pages.shape[2])
    # It needs JAX 0.11, and its import is slow.
    from pallas_kernels.paged_attention.mosaic_tile import TileKernel

    layers, num_pages, kv_heads, page_size, head_dim = k_pages.shape
    # A window's second mask, or a soft cap, take registers; wide heads leave them only with smaller
    # products.
    is_plain = sliding_window is None and soft_cap is None
    parts = 1 if is_plain or head_dim == _HEAD_DIMS[0] else 2
    kernel = TileKernel(
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        group=tiling.group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        block_keys=tiling.warpgroups.block_keys // parts,
        num_stages=tiling.warpgroups.num_stages * parts,
        programs=tiling.tile_programs,
        dtype=q.dtype,
        interpret=interpret,
    )
    pages = (layers * num_pages, *k_pages.shape[2:])
    first_page = jnp.asarray(layer, jnp.int32) * num_pages
    tiled = kernel(
        jnp.stack([jnp.asarray(plan.counts[0], jnp.int32), first_page]),
        _items(plan.tiles, rows, sliding_window),
        rows.page_table,
        q,
        k_pages.reshape(pages),
        v_pages.reshape(pages),
        jnp.zeros_like(q),
    )
    if not len(plan.splits):
        return tiled
    out = triton.paged_attention(
        *(q, k_pages, v_pages, layer, rows),
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        alibi_slopes=None,
        distance_bias=None,
        k_scales=k_scales,
        v_scales=v_scales,
        max_query_length=max_query_length,
        plan=plan,
        interpret=interpret,
        tiled=tiled,
    )
    dispatch.record(
        "paged_attention, rows of few queries",
        "triton_interpreted" if interpret else "triton",
        "mosaic has a kernel for tiles only",
        q=q,
        k_pages=k_pages,
    )
    return out


def serves(group: int, head_dim: int, dtype: str, page_dtype: str) -> bool:
    """Return whether the kernel serves these heads and dtypes in some batches."""
    fits = group <= _MAX_GROUP and head_dim in _HEAD_DIMS
    return fits and dtype in _DTYPES and page_dtype == dtype


def _items(
    tiles: Int[Array, "tiles 3"], rows: Rows, sliding_window: int | None
) -> Int[Array, "tiles columns"]:
    """Return the plan's tiles for the current rows, int32 [tiles, len(ITEM_COLUMNS)].

    Rows may have shrunk or ended since the plan was made.
    """
    row, first_query, num_queries = (jnp.asarray(tiles)[:, column] for column in range(3))
    count = jnp.clip(rows.query_length[row] - first_query, 0, num_queries)
    position = rows.first_position[row] + first_query
    context = rows.context_length[row]
    end = jnp.where(count > 0, jnp.clip(position + count, 0, jnp.maximum(context, 0)), 0)
    begin = jnp.zeros_like(end)
    if sliding_window is not None:
        begin = jnp.maximum(position - sliding_window + 1, 0)
    token = rows.query_start[row] + first_query
    return jnp.stack([row, token, count, position, begin, end, context], axis=1)


def _check_platform() -> None:
    platform = dispatch.target_platform()
    if platform != "cuda":
        raise NotImplementedError(f"it is compiled for NVIDIA GPUs, not for {platform}")
    capability = dispatch.compute_capability()
    if capability is not None and capability[0] != 9:
        raise NotImplementedError(f"it needs Hopper (sm_90a), not compute capability {capability}")


def _check_types(q: jax.Array, pages: jax.Array, sliding_window: int | None) -> None:
    if str(q.dtype) not in _DTYPES or q.dtype != pages.dtype:
        raise NotImplementedError(
            f"it serves queries and pages of one dtype of {_DTYPES}, not {q.dtype} and "
            f"{pages.dtype}"
        )
    if q.shape[2] not in _HEAD_DIMS:
        raise NotImplementedError(f"head_dim must be one of {_HEAD_DIMS}, not {q.shape[2]}")
    group = q.shape[1] // pages.shape[2]
    if group > _MAX_GROUP:
        raise NotImplementedError(
            f"it serves up to {_MAX_GROUP} query heads per KV head, not {group}"
        )
    if sliding_window is not None and sliding_window < 1:
        raise NotImplementedError(f"a sliding window of {sliding_window} sees nothing")


def _check_page_size(pages: jax.Array, plan: Plan) -> None:
    if plan.tiling.warpgroups is None:
        raise NotImplementedError(
            "the plan's tiles are another kernel's; use "
            "planned_tiling(..., implementation='mosaic')"
        )
    size, block = pages.shape[3], plan.tiling.warpgroups.block_keys
    if size < _MIN_PAGE or (block % size and size % block):
        raise NotImplementedError(
            f"it serves pages of {_MIN_PAGE} tokens or more that divide {block} or are a multiple "
            f"of it, not of {size}"
        )
