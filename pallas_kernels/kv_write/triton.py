"""Rotation and writes on NVIDIA GPUs from sm_80 on: one Pallas kernel compiled by Triton.

The heads of `qkv` are consecutive rows in memory. A program takes some of them, rotates the queries
and keys, and stores queries in the output, and keys and values in their pages in place.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Float32, Int, Real

from jaxserve.kernels import gpu
from jaxserve.kernels.kv_write.operands import LARGEST, RopeTables, Written

_DTYPES = ("float32", "bfloat16", "float16")
_MAX_WIDTH = 256
# Rows per program: the largest of these that gives at least _PROGRAMS programs, for large GPUs.
_ROWS = (16, 8, 4)
_PROGRAMS = 1024
# Rows per warp: 32 threads load 16 bytes each, for the head sizes of most models.
_ROWS_A_WARP = 4


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
    interpret: bool = False,
) -> Written:
    """Implement `api.rotate_and_write`; `interpret` runs on any platform, for tests."""
    if not interpret:
        gpu.require_triton(k_pages.dtype)
    page_dtypes = _DTYPES if k_scales is None else (*LARGEST,)
    if qkv.dtype.name not in _DTYPES or k_pages.dtype.name not in page_dtypes:
        raise NotImplementedError(
            f"it serves heads in one of {_DTYPES} and pages in one of {page_dtypes}, not "
            f"{qkv.dtype} and {k_pages.dtype}"
        )
    tokens, kv_heads, columns, head_dim = qkv.shape
    if head_dim > _MAX_WIDTH:
        raise NotImplementedError(f"it serves head_dim up to {_MAX_WIDTH}, not {head_dim}")
    gpu.require_addressable(k_pages, v_pages)
    layers, num_pages = k_pages.shape[:2]
    num_rows = tokens * kv_heads * columns
    rows = next((n for n in _ROWS if num_rows >= n * _PROGRAMS), _ROWS[-1])
    sizes = _Sizes(
        rows=rows,
        num_rows=num_rows,
        kv_heads=kv_heads,
        columns=columns,
        head_dim=head_dim,
        half=0 if tables is None else tables[0].shape[1],
        num_pages=num_pages,
    )

    def flat(pages: jax.Array) -> jax.Array:
        return pages.reshape(layers * num_pages, *pages.shape[2:])

    cache = _Cache(k=k_pages, v=v_pages, k_scales=k_scales, v_scales=v_scales)
    operands = _Operands(
        layer=jnp.asarray(layer, jnp.int32).reshape(1),
        page=page,
        offset=offset,
        tables=tables,
        qkv=qkv.reshape(num_rows, head_dim),
        cache=jax.tree.map(flat, cache),
    )
    num_inputs, num_buffers = len(jax.tree.leaves(operands)), len(jax.tree.leaves(cache))
    q, written = pl.pallas_call(
        partial(_rotate_and_write_kernel, sizes),
        grid=(-(-num_rows // rows),),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, kv_heads * (columns - 2), head_dim), qkv.dtype),
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands.cache),
        ),
        input_output_aliases={num_inputs - num_buffers + i: 1 + i for i in range(num_buffers)},
        compiler_params=triton.CompilerParams(num_warps=rows // _ROWS_A_WARP, num_stages=1),
        interpret=interpret,
        name="rotate_and_write",
    )(operands)
    written = jax.tree.map(lambda new, old: new.reshape(old.shape), written, cache)
    return q, written.k, written.v, written.k_scales, written.v_scales


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _Cache:
    """The cache, which is written in place: arrays in the call, references in the kernel."""

    k: Any  # [layers * pages, kv_heads, page_size, head_dim]
    v: Any
    k_scales: Any  # float32 [layers * pages, kv_heads, page_size], or None
    v_scales: Any


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _Operands:
    """The kernel's inputs; the cache is the last field, for `input_output_aliases`."""

    layer: Any  # int32 [1]
    page: Any  # int32 [tokens]
    offset: Any  # int32 [tokens]
    tables: Any  # None, or twice float32 [tokens, half]
    qkv: Any  # [tokens * kv_heads * columns, head_dim]
    cache: Any  # `_Cache`


@final
@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """The static parameters of the kernel; `columns` is group + 2, as in `qkv`."""

    rows: int
    num_rows: int
    kv_heads: int
    columns: int
    head_dim: int
    half: int
    num_pages: int


def _rotate_and_write_kernel(
    sizes: _Sizes,
    operands: _Operands,
    q_ref: Any,  # [tokens, kv_heads * group, head_dim]
    cache: _Cache,
) -> None:
    row = pl.program_id(0) * sizes.rows + jnp.arange(sizes.rows, dtype=jnp.int32)
    exists = row < sizes.num_rows
    group, column = sizes.columns - 2, row % sizes.columns
    head = row // sizes.columns % sizes.kv_heads
    token = row // (sizes.columns * sizes.kv_heads)
    page = triton.load(operands.page.at[token], mask=exists, other=0)
    offset = triton.load(operands.offset.at[token], mask=exists, other=0)

    def pages_of(wanted: int) -> jax.Array:
        # The interpreter rewrites the old content of masked rows, so these go to the null page.
        return jnp.where(column == wanted, operands.layer[0] * sizes.num_pages + page, 0)

    parts = _rotated(sizes, operands, row, token, column)
    for lane, mask, values in parts:
        here = q_ref.at[token[:, None], (head * group + column)[:, None], lane[None, :]]
        triton.store(here, values, mask=mask & (column < group)[:, None])
    wide = [values.astype(jnp.float32) for _, _, values in parts]
    if cache.k_scales is not None:
        dtype = cache.k.dtype
        largest = [jnp.max(jnp.abs(values), axis=1) for values in wide]
        scale = functools.reduce(jnp.maximum, largest) / LARGEST[dtype.name]
        wide = [values / jnp.where(scale == 0.0, 1.0, scale)[:, None] for values in wide]
        if dtype == jnp.int8:
            wide = [jnp.floor(values + 0.5) for values in wide]
        for ref, wanted in ((cache.k_scales, group), (cache.v_scales, group + 1)):
            here = ref.at[pages_of(wanted), head, offset]
            triton.store(here, scale, mask=exists & (column == wanted))
    for ref, wanted in ((cache.k, group), (cache.v, group + 1)):
        for (lane, mask, _), values in zip(parts, wide, strict=True):
            here = ref.at[pages_of(wanted)[:, None], head[:, None], offset[:, None], lane[None, :]]
            triton.store(here, values.astype(ref.dtype), mask=mask & (column == wanted)[:, None])


def _rotated(
    sizes: _Sizes, operands: _Operands, row: jax.Array, token: jax.Array, column: jax.Array
) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """Return parts (dimensions [count], mask, values [rows, count]) with queries and keys rotated.

    Masked values are 0.
    """

    def load(begin: int, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        lane = jnp.arange(gpu.power_of_two(count), dtype=jnp.int32)
        mask = (row < sizes.num_rows)[:, None] & (lane < count)[None, :]
        here = operands.qkv.at[row[:, None], begin + lane[None, :]]
        return begin + lane, mask, triton.load(here, mask=mask, other=0.0)

    half, parts = sizes.half, []
    if half:
        (lane, mask, first), (next_lane, _, second) = load(0, half), load(half, half)
        cos, sin = (
            triton.load(table.at[token[:, None], lane[None, :]], mask=mask, other=0.0)
            for table in operands.tables
        )
        x, y = first.astype(jnp.float32), second.astype(jnp.float32)
        is_value = (column == sizes.columns - 1)[:, None]
        x, y = x * cos - y * sin, y * cos + x * sin
        parts = [
            (lane, mask, jnp.where(is_value, first, x.astype(first.dtype))),
            (next_lane, mask, jnp.where(is_value, second, y.astype(second.dtype))),
        ]
    if sizes.head_dim > 2 * half:
        parts.append(load(2 * half, sizes.head_dim - 2 * half))
    return parts
