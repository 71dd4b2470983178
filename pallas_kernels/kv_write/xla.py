"""Rotation and writes in plain XLA, for every platform and sharding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Real

from jaxserve.kernels.kv_write.operands import RopeTables, Written, apply_rope, quantize
from jaxserve.kernels.put_rows import put_rows, serves


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
    tokens, _, columns, head_dim = qkv.shape
    group = columns - 2
    rotated = qkv[:, :, : group + 1]
    if tables is not None:
        rotated = apply_rope(rotated, tables)

    def written(
        pages: jax.Array, scales: jax.Array | None, values: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        if scales is None:
            return kv_write(pages, layer, values, page, offset), None
        values, each = quantize(values, pages.dtype)
        # A scale is written as a head of one dimension.
        scales = kv_write(scales[..., None], layer, each[..., None], page, offset)[..., 0]
        return kv_write(pages, layer, values, page, offset), scales

    k_pages, k_scales = written(k_pages, k_scales, rotated[:, :, group])
    v_pages, v_scales = written(v_pages, v_scales, qkv[:, :, group + 1])
    q = rotated[:, :, :group].reshape(tokens, -1, head_dim)
    return q, k_pages, v_pages, k_scales, v_scales


def kv_write(
    pages: Real[Array, "layers pages kv_heads page_size head_dim"],
    layer: int | Int[Array, ""],
    values: Real[Array, "tokens kv_heads head_dim"],
    page: Int[Array, " tokens"],
    offset: Int[Array, " tokens"],
) -> Real[Array, "layers pages kv_heads page_size head_dim"]:
    """Write one step's keys (or values) into the paged cache, in place when `pages` is donated.

    Args:
      pages: [layers, pages, kv_heads, page_size, head_dim].
      layer, page, offset: as in `rotate_and_write`.
      values: [tokens, kv_heads, head_dim].

    Returns:
      `pages` with the tokens written.
    """
    values = values.astype(pages.dtype)
    if not serves(pages):
        return pages.at[layer, page, :, offset, :].set(values)
    _, num_pages, kv_heads, page_size, head_dim = pages.shape
    head = (layer * num_pages + page)[:, None] * kv_heads + jnp.arange(kv_heads)
    place = head * page_size + offset[:, None]
    return put_rows(pages, place.reshape(-1), values.reshape(-1, head_dim))
