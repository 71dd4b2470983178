"""Paged attention on Hopper GPUs: Mosaic GPU kernels for tiles, and for rows of few queries.

The two share a batch by `planner.plan`; Triton's merge kernel merges the partial results of the
second. They were never run on a GPU. They are compiled for one and run in JAX's interpreter, so
they are used only when they are requested by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.kernels import dispatch, gpu, versions
from jaxserve.kernels.paged_attention.operands import AttentionCall, Rows
from jaxserve.kernels.paged_attention.planner import Plan, Warpgroups

_DTYPES = ("bfloat16", "float16")
_HEAD_DIMS = (64, 128)
# Query heads per KV head; a warpgroup's products have 64 rows.
_MAX_GROUP = 64
_MIN_PAGE = 16


def paged_attention(
    call: AttentionCall, *, interpret: bool = False
) -> Float[Array, "tokens q_heads head_dim"]:
    """Implement `api.paged_attention`. Tokens in no row get zeros.

    `interpret` detects races and is very slow.
    """
    versions.check_mosaic()
    if not interpret:
        _check_platform()
    if call.plan is None:
        raise NotImplementedError("it needs a plan of the batch; pass plan=")
    if call.alibi_slopes is not None:
        raise NotImplementedError("it does not support ALiBi")
    if call.distance_bias is not None:
        raise NotImplementedError("it has no bias by distance")
    if call.sinks is not None:
        raise NotImplementedError("it has no attention sinks")
    if call.scale <= 0.0:
        raise NotImplementedError(f"it needs a positive scale of the logits, not {call.scale}")
    _check_types(call.q, call.k_pages, call.sliding_window)
    _check_page_size(call.k_pages, call.plan)
    call.plan.tiling.check_heads(call.q.shape[1], call.k_pages.shape[2])
    kernels = _Kernels(call, call.plan, interpret)
    out = call.q
    if len(call.plan.tiles):
        out = kernels.tiles()
    return kernels.splits(out) if len(call.plan.splits) else out


@final
@dataclass(frozen=True, eq=False)
class _Kernels:
    """The two kernels on the arguments of a call."""

    given: AttentionCall
    plan: Plan
    interpret: bool

    @property
    def logits(self) -> dict[str, Any]:
        given = self.given
        return dict(scale=given.scale, sliding_window=given.sliding_window, soft_cap=given.soft_cap)

    @property
    def warpgroups(self) -> Warpgroups:
        assert self.plan.tiling.warpgroups is not None
        return self.plan.tiling.warpgroups

    def tiles(self) -> jax.Array:
        """Return the output of the plan's tiles, and zeros for other queries."""
        # They need JAX 0.11, and their imports are slow.
        from jaxserve.kernels.paged_attention.mosaic_tile import TileKernel

        given, tiling = self.given, self.plan.tiling
        num_pages, kv_heads, page_size, head_dim = given.k_pages.shape[1:]
        window = given.sliding_window
        # A window's second mask, or a soft cap, need registers; wide heads leave them only with
        # smaller products.
        is_plain = window is None and given.soft_cap is None
        parts = 1 if is_plain or head_dim == _HEAD_DIMS[0] else 2
        kernel = TileKernel(
            **self.logits,
            group=tiling.group,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            block_keys=self.warpgroups.block_keys // parts,
            num_stages=self.warpgroups.num_stages * parts,
            programs=tiling.tile_programs,
            dtype=given.q.dtype,
            interpret=self.interpret,
        )
        first_page = jnp.asarray(given.layer, jnp.int32) * num_pages
        return kernel(
            jnp.stack([jnp.asarray(self.plan.counts[0], jnp.int32), first_page]),
            _items(self.plan.tiles, given.rows, window),
            given.rows.page_table,
            given.q,
            *self._flat_pages(),
            jnp.zeros_like(given.q),
        )

    def splits(self, out: jax.Array) -> jax.Array:
        """Return `out` with the output of the plan's other items.

        `out` is the queries themselves if the plan has no tiles. An item reads its own queries
        before it overwrites them, and no other item reads them.
        """
        from jaxserve.kernels.paged_attention.mosaic_split import SplitKernel, SplitSizes

        given, tiling, rows = self.given, self.plan.tiling, self.given.rows
        num_pages, kv_heads, page_size, head_dim = given.k_pages.shape[1:]
        sizes = SplitSizes(
            **self.logits,
            group=tiling.group,
            columns=tiling.split_rows,
            kv_heads=kv_heads,
            head_dim=head_dim,
            num_pages=num_pages,
            page_size=page_size,
            split_keys=tiling.split_keys,
            block_keys=self.warpgroups.split_block_keys,
            num_stages=self.warpgroups.split_stages,
            programs=tiling.split_programs,
            num_partials=self.plan.num_partials,
            dtype=given.q.dtype,
            interpret=self.interpret,
        )
        steering = (
            jnp.asarray(self.plan.counts),
            jnp.asarray(given.layer, jnp.int32).reshape(1),
            jnp.asarray(self.plan.splits),
            rows.query_start,
            rows.query_length,
            rows.first_position,
            rows.context_length,
            rows.page_table,
        )
        q = None if out is given.q else given.q
        out, values, sums = SplitKernel(sizes)(steering, q, *self._flat_pages(), out)
        from jaxserve.kernels.paged_attention import triton

        out = triton.merge(
            self.plan, rows, values, sums, out, is_decode=given.is_decode, interpret=self.interpret
        )
        dispatch.record(
            "paged_attention, partial results",
            "triton_interpreted" if self.interpret else "triton",
            "mosaic has no kernel that merges them",
            q=given.q,
            k_pages=given.k_pages,
        )
        return out

    def _flat_pages(self) -> tuple[jax.Array, jax.Array]:
        k_pages, v_pages = self.given.k_pages, self.given.v_pages
        shape = (-1, *k_pages.shape[2:])
        return k_pages.reshape(shape), v_pages.reshape(shape)


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
    target = gpu.target()
    if target is not None and not target.has_mosaic:
        raise NotImplementedError(
            f"it needs Hopper (sm_90a), not compute capability {target.capability}"
        )


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
    size = pages.shape[3]
    for block in (plan.tiling.warpgroups.block_keys, plan.tiling.warpgroups.split_block_keys):
        if size < _MIN_PAGE or (block % size and size % block):
            raise NotImplementedError(
                f"it serves pages of {_MIN_PAGE} tokens or more that divide {block} or are a "
                f"multiple of it, not of {size}"
            )
