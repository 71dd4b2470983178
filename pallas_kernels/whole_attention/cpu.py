"""Attention over whole sequences on the CPU, with the kernels that serve the paged cache.

The keys and values of each sequence fill its own pages, in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.kernels.kv_write import RopeTables, rotate_and_write
from jaxserve.kernels.paged_attention import Rows, paged_attention
from jaxserve.kernels.whole_attention import xla

_PAGE_SIZE = 64


@final
@dataclass(frozen=True, kw_only=True)
class _Static:
    length: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    alibi_slopes: tuple[float, ...] | None


def whole_attention(
    qkv: Float[Array, "tokens kv_heads columns head_dim"],
    tables: RopeTables | None,
    *,
    length: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    alibi_slopes: tuple[float, ...] | None,
    sinks: Float[Array, " q_heads"] | None,
) -> Float[Array, "tokens q_heads head_dim"]:
    if qkv.size == 0:
        raise NotImplementedError(f"qkv{qkv.shape} is empty")
    options = _Static(
        length=length,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
    )
    return _attention(options, qkv, tables, sinks)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attention(
    options: _Static,
    qkv: Float[Array, "tokens kv_heads columns head_dim"],
    tables: RopeTables | None,
    sinks: Float[Array, " q_heads"] | None,
) -> Float[Array, "tokens q_heads head_dim"]:
    tokens, kv_heads, _, head_dim = qkv.shape
    num_sequences, pages_each = tokens // options.length, -(-options.length // _PAGE_SIZE)
    # Page 0 is the null page.
    page_table = 1 + jnp.arange(num_sequences * pages_each).reshape(num_sequences, pages_each)
    position = jnp.tile(jnp.arange(options.length), num_sequences)
    sequence = jnp.repeat(jnp.arange(num_sequences), options.length)
    pages = jnp.zeros((1, 1 + page_table.size, kv_heads, _PAGE_SIZE, head_dim), qkv.dtype)
    q, k_pages, v_pages, _, _ = rotate_and_write(
        qkv,
        tables,
        pages,
        pages,
        0,
        page_table[sequence, position // _PAGE_SIZE],
        position % _PAGE_SIZE,
        implementation="cpu",
    )
    lengths = jnp.full(num_sequences, options.length)
    rows = Rows(
        query_start=jnp.arange(num_sequences) * options.length,
        query_length=lengths,
        first_position=jnp.zeros_like(lengths),
        context_length=lengths,
        page_table=page_table,
    )
    slopes = options.alibi_slopes
    return paged_attention(
        q,
        k_pages,
        v_pages,
        0,
        rows,
        scale=options.scale,
        sliding_window=options.sliding_window,
        soft_cap=options.soft_cap,
        alibi_slopes=None if slopes is None else jnp.asarray(slopes, jnp.float32),
        sinks=sinks,
        implementation="cpu",
    )


@_attention.defjvp
def _derivative(
    options: _Static,
    values: tuple[jax.Array, RopeTables | None, jax.Array | None],
    tangents: tuple[jax.Array, RopeTables | None, jax.Array | None],
) -> tuple[jax.Array, jax.Array]:
    """Compute the tangent with XLA's operations, which XLA can transpose."""

    def attend(qkv: jax.Array, tables: RopeTables | None, sinks: jax.Array | None) -> jax.Array:
        return xla.whole_attention(
            qkv,
            tables,
            length=options.length,
            scale=options.scale,
            sliding_window=options.sliding_window,
            soft_cap=options.soft_cap,
            alibi_slopes=options.alibi_slopes,
            sinks=sinks,
        )

    return _attention(options, *values), jax.jvp(attend, values, tangents)[1]
