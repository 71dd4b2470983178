"""The reference of rotation and writes, token by token in NumPy; it cannot be traced."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Real

from jaxserve.kernels.kv_write.operands import RopeTables, Written, quantize


def kv_write(
    pages: Real[Array, "layers pages kv_heads page_size head_dim"],
    layer: int | Int[Array, ""],
    values: Real[Array, "tokens kv_heads head_dim"],
    page: Int[Array, " tokens"],
    offset: Int[Array, " tokens"],
) -> Real[Array, "layers pages kv_heads page_size head_dim"]:
    """Implement `xla.kv_write`. If tokens share an offset of a page, the last one is kept."""
    out, new = np.array(pages), np.asarray(values)
    places = zip(np.asarray(page).tolist(), np.asarray(offset).tolist(), strict=True)
    for token, (page_id, place) in enumerate(places):
        for head in range(new.shape[1]):
            out[int(layer), page_id, head, place] = new[token, head]
    return jnp.asarray(out)


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
    if isinstance(qkv, jax.core.Tracer):
        raise NotImplementedError("the reference runs outside jit only; use implementation='xla'")
    turned = np.array(qkv, np.float32)  # [tokens, kv_heads, group + 2, head_dim]
    if tables is not None:
        cos, sin = (np.asarray(table, np.float32) for table in tables)
        half = cos.shape[1]
        for token, head, column in np.ndindex(*qkv.shape[:2], qkv.shape[2] - 1):
            x = turned[token, head, column]
            x[: 2 * half] = [
                *(x[:half] * cos[token] - x[half : 2 * half] * sin[token]),
                *(x[half : 2 * half] * cos[token] + x[:half] * sin[token]),
            ]
    given = jnp.asarray(turned, qkv.dtype)
    keys, values = given[:, :, -2], given[:, :, -1]
    if k_scales is not None and v_scales is not None:
        (keys, k_each), (values, v_each) = (quantize(x, k_pages.dtype) for x in (keys, values))
        k_scales = kv_write(k_scales[..., None], layer, k_each[..., None], page, offset)[..., 0]
        v_scales = kv_write(v_scales[..., None], layer, v_each[..., None], page, offset)[..., 0]
    k_pages = kv_write(k_pages, layer, keys.astype(k_pages.dtype), page, offset)
    v_pages = kv_write(v_pages, layer, values.astype(v_pages.dtype), page, offset)
    q = given[:, :, :-2].reshape(qkv.shape[0], -1, qkv.shape[3])
    return q, k_pages, v_pages, k_scales, v_scales
