"""Attention over whole sequences in plain XLA, for every platform and sharding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.kernels.kv_write import RopeTables, apply_rope


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
    tokens, kv_heads, columns, head_dim = qkv.shape
    group = columns - 2
    rotated = qkv[:, :, : group + 1]
    if tables is not None:
        rotated = apply_rope(rotated, tables)
    grouped = rotated[:, :, :group].reshape(-1, length, kv_heads, group, head_dim)
    k, v = (
        x.reshape(-1, length, kv_heads, head_dim)
        for x in (rotated[:, :, group], qkv[:, :, group + 1])
    )
    logits = jnp.einsum("bqkgd,bskd->bkgqs", grouped, k, preferred_element_type=jnp.float32)
    logits = logits * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    back = jnp.arange(length)[:, None] - jnp.arange(length)
    if alibi_slopes is not None:
        slopes = jnp.asarray(alibi_slopes, jnp.float32).reshape(kv_heads, group, 1, 1)
        logits = logits - slopes * back.astype(jnp.float32)
    seen = back >= 0
    if sliding_window is not None:
        seen &= back < sliding_window
    logits = jnp.where(seen, logits, -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, kv_heads, group, 1, 1)
        sink = jnp.broadcast_to(sink, (*logits.shape[:-1], 1))
        logits = jnp.concatenate([logits, sink], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., :length].astype(v.dtype)
    return jnp.einsum("bkgqs,bskd->bqkgd", weights, v).reshape(tokens, -1, head_dim)
