"""Paged attention in plain XLA, the fallback on every platform.

The cost depends on the contexts, not on the width of the page tables: a loop with a dynamic trip
count reads one split (a fixed number of pages) at a time, with the online softmax of Milakov and
Gimelshein (arXiv:1805.02867) in float32. Single-token rows run in blocks of rows; longer rows are
cut into tiles of queries, which run one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Real

from jaxserve.kernels.paged_attention.operands import AttentionCall, Rows

# A split is the number of pages that holds this number of tokens, at least one page.
DECODE_SPLIT_TOKENS = 128
DECODE_BLOCK_ROWS = 8
TILE_SPLIT_TOKENS = 256
TILE_QUERIES = 64

# Used for minus infinity: exp(_MASKED - maximum) is 0, and _MASKED - _MASKED is not NaN.
_MASKED = -1e30


def paged_attention(call: AttentionCall) -> Float[Array, "tokens q_heads head_dim"]:
    q, rows = call.q, call.rows
    tokens, num_heads, head_dim = q.shape
    kv_heads = call.k_pages.shape[2]
    shape = (kv_heads, num_heads // kv_heads)
    slopes, bias, sinks = call.alibi_slopes, call.distance_bias, call.sinks
    attend = partial(
        _attend,
        k_pages=call.k_pages,
        v_pages=call.v_pages,
        layer=call.layer,
        options=_Options(
            call.sliding_window,
            call.soft_cap,
            None if slopes is None else slopes.astype(jnp.float32).reshape(shape),
            None if bias is None else bias.astype(jnp.float32).reshape(*shape, -1),
            None if sinks is None else sinks.astype(jnp.float32).reshape(shape),
            call.k_scales,
            call.v_scales,
        ),
    )
    scaled = (q.astype(jnp.float32) * call.scale).reshape(tokens, *shape, head_dim)
    attended = _single_token_rows if call.is_decode else _mixed_rows
    return attended(scaled, rows, attend).reshape(q.shape).astype(q.dtype)


@final
@dataclass(frozen=True)
class _Options:
    sliding_window: int | None
    soft_cap: float | None
    alibi_slopes: Float32[Array, "kv_heads group"] | None
    distance_bias: Float32[Array, "kv_heads group distances"] | None
    sinks: Float32[Array, "kv_heads group"] | None
    k_scales: Float32[Array, "layers pages kv_heads page_size"] | None
    v_scales: Float32[Array, "layers pages kv_heads page_size"] | None


def _single_token_rows(
    q: Float32[Array, "rows kv_heads group head_dim"], rows: Rows, attend: Any
) -> Float32[Array, "rows kv_heads group head_dim"]:
    """Attend for rows of one query each; `q` is [rows, kv_heads, group, head_dim].

    Blocks of rows run one after another, each up to its longest context; unused rows read nothing.
    """
    num_rows = q.shape[0]
    block = min(DECODE_BLOCK_ROWS, num_rows)
    missing = -num_rows % block

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1)))

    query = padded(q)[:, None]
    position = padded(rows.first_position)[:, None]
    context = padded(jnp.where(rows.query_length > 0, rows.context_length, 0))
    page_table = padded(rows.page_table)

    def one_block(index: jax.Array, out: jax.Array) -> jax.Array:
        part = partial(lax.dynamic_slice_in_dim, start_index=index * block, slice_size=block)
        attended = attend(
            part(query),
            position=part(position),
            context=part(context),
            page_table=part(page_table),
            split_tokens=DECODE_SPLIT_TOKENS,
        )
        return lax.dynamic_update_slice_in_dim(out, attended, index * block, axis=0)

    out = lax.fori_loop(0, query.shape[0] // block, one_block, jnp.zeros_like(query))
    return out[:num_rows, 0]


def _mixed_rows(
    q: Float32[Array, "tokens kv_heads group head_dim"], rows: Rows, attend: Any
) -> Float32[Array, "tokens kv_heads group head_dim"]:
    """Attend for rows of any length; `q` is [tokens, kv_heads, group, head_dim]."""
    tokens = q.shape[0]
    tile = min(TILE_QUERIES, tokens)
    # Tiles of rows with two or more queries, numbered row by row; ends[r] follows row r's last.
    single = rows.query_length == 1
    num_tiles = jnp.where(single, 0, -(-rows.query_length // tile))
    ends = jnp.cumsum(num_tiles)
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0), (0, 0)))

    def one_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
        skipped = (index - (ends[row] - num_tiles[row])) * tile
        start = rows.query_start[row] + skipped
        live = jnp.arange(tile) < rows.query_length[row] - skipped
        position = rows.first_position[row] + skipped + jnp.arange(tile)
        # Queries past the row's end take its last query's position; their result is dropped.
        last = rows.first_position[row] + rows.query_length[row] - 1
        block = attend(
            lax.dynamic_slice_in_dim(padded, start, tile)[None],
            position=jnp.minimum(position, last)[None],
            context=rows.context_length[row][None],
            page_table=lax.dynamic_slice_in_dim(rows.page_table, row, 1),
            split_tokens=TILE_SPLIT_TOKENS,
        )[0]
        old = lax.dynamic_slice_in_dim(out, start, tile)
        block = jnp.where(live[:, None, None, None], block, old)
        return lax.dynamic_update_slice_in_dim(out, block, start, axis=0)

    out = lax.fori_loop(0, ends[-1], one_tile, jnp.zeros_like(padded))[:tokens]
    first = jnp.where(single, rows.query_start, 0)
    alone = _single_token_rows(
        q[first],
        Rows(
            query_start=first,
            query_length=single.astype(jnp.int32),
            first_position=rows.first_position,
            context_length=rows.context_length,
            page_table=rows.page_table,
        ),
        attend,
    )
    return out.at[jnp.where(single, rows.query_start, tokens)].set(alone, mode="drop")


def _attend(
    q: Float32[Array, "blocks queries kv_heads group head_dim"],
    k_pages: Real[Array, "layers pages kv_heads page_size head_dim"],
    v_pages: Real[Array, "layers pages kv_heads page_size head_dim"],
    layer: int | Int[Array, ""],
    options: _Options,
    position: Int[Array, "blocks queries"],
    context: Int[Array, " blocks"],
    page_table: Int[Array, "blocks row_pages"],
    split_tokens: int,
) -> Float32[Array, "blocks queries kv_heads group head_dim"]:
    """Attend for several blocks of queries, each over the pages of one sequence.

    Args:
      q: float32 [blocks, queries, kv_heads, group, head_dim], already scaled.
      k_pages, v_pages: [layers, pages, kv_heads, page_size, head_dim].
      position: int32 [blocks, queries], increasing along a block.
      context: int32 [blocks]; 0 for a block that reads nothing.
      page_table: int32 [blocks, pages].

    Returns:
      float32, q's shape; zeros for queries that see no key.
    """
    layers, num_pages, kv_heads, page_size, head_dim = k_pages.shape
    blocks, queries, _, group, _ = q.shape
    pages = max(1, min(split_tokens // page_size, page_table.shape[1]))
    page_table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages)))
    tokens = pages * page_size
    end = jnp.minimum(context, position[:, -1] + 1)
    start = jnp.zeros_like(end)
    if options.sliding_window is not None:
        start = jnp.clip(position[:, 0] - options.sliding_window + 1, 0, end)
    first_split = jnp.min(jnp.where(end > 0, start, jnp.iinfo(jnp.int32).max)) // tokens
    end_split = -(-jnp.max(end) // tokens)
    # One product per page and KV head needs no transposed copy of the keys.
    paged_q = jnp.moveaxis(q, 1, 3)[:, None]
    paged_q = jnp.broadcast_to(paged_q, (blocks, pages, *paged_q.shape[2:]))

    def read(cache: jax.Array, scales: jax.Array | None, table: jax.Array) -> jax.Array:
        def gathered(x: jax.Array, *tail: int) -> jax.Array:
            # XLA gathers fastest when a page is one flat row of a two-dimensional array.
            flat = x.reshape(layers * num_pages, -1)
            got = flat.at[table + layer * num_pages].get(mode="promise_in_bounds")
            return got.astype(jnp.float32).reshape(blocks, pages, *tail)

        got = gathered(cache, kv_heads, page_size, head_dim)
        return got if scales is None else got * gathered(scales, kv_heads, page_size, 1)

    def one_split(split: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        maximum, total, weighted = carry
        table = lax.dynamic_slice_in_dim(page_table, split * pages, pages, axis=1)
        k = read(k_pages, options.k_scales, table)
        v = read(v_pages, options.v_scales, table)
        # [blocks, pages, page_size]
        key = (split * tokens + jnp.arange(tokens)).reshape(1, pages, page_size)
        exists = key < end[:, None, None]
        held = exists
        if options.sliding_window is not None:  # pages before it may be those of other sequences
            held &= key >= start[:, None, None]
        v = jnp.where(held[:, :, None, :, None], v, 0.0)
        # [blocks, pages, kv_heads, group, queries, page_size]
        logits = jnp.einsum("bphgqd,bphsd->bphgqs", paged_q, k)
        if options.soft_cap is not None:
            logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
        # [blocks, pages, 1, 1, queries, page_size]
        distance = key[:, :, None, None, None] - position[:, None, None, None, :, None]
        if options.alibi_slopes is not None:
            slopes = options.alibi_slopes[None, None, :, :, None, None]
            logits += slopes * distance.astype(jnp.float32)
        if options.distance_bias is not None:
            last = options.distance_bias.shape[-1] - 1
            # [kv_heads, group, blocks, pages, queries, page_size]
            bias = options.distance_bias[:, :, jnp.clip(-distance[:, :, 0, 0], 0, last)]
            logits += jnp.moveaxis(bias, (0, 1), (2, 3))
        seen = exists[:, :, None, None, None] & (distance <= 0)
        if options.sliding_window is not None:
            seen &= distance > -options.sliding_window
        logits = jnp.where(seen, logits, _MASKED)
        new_maximum = jnp.maximum(maximum, logits.max((1, -1)))
        weights = jnp.exp(logits - new_maximum[:, None, ..., None])
        weights = jnp.where(seen, weights, 0.0)
        kept = jnp.exp(maximum - new_maximum)
        if queries == 1:
            added = jnp.einsum("bphgqs,bphsd->bphgqd", weights, v).sum(1)
        else:  # with many queries, transposing the values is cheaper than a product per page
            added = jnp.einsum("bphgqs,bphsd->bhgqd", weights, v)
        return (
            new_maximum,
            total * kept + weights.sum((1, -1)),
            weighted * kept[..., None] + added,
        )

    shape = (blocks, kv_heads, group, queries)
    initial = (
        jnp.full(shape, _MASKED),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )
    maximum, total, weighted = lax.fori_loop(first_split, end_split, one_split, initial)
    if options.sinks is not None:
        # Infinite if the sink outweighs all keys by more than float32 holds; then the rest is 0.
        total += jnp.exp(options.sinks[:, :, None] - maximum)
    out = weighted / jnp.where(total == 0.0, 1.0, total)[..., None]
    return jnp.moveaxis(out, 3, 1)
