"""What a layer's attention works with: a paged cache to serve, whole sequences to train."""

from __future__ import annotations

from typing import Protocol, final

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.models.batch import AttentionBatch, KVCache
from pallas_kernels import RopeTables, apply_rope


class LayerContext(Protocol):
    """Positions, and the keys that a query may see. Made anew for every layer of a trace."""

    def attend(self, qkv: Array, *, scale: float | None, soft_cap: float | None) -> Array:
        """What the queries of `qkv` find, [tokens, q_heads, head_dim].

        `qkv` [tokens, kv_heads, group + 2, head_dim] has of each KV head its queries, its key and
        its value. Queries and keys are turned by their positions here, where those are rotary.
        Scale and soft cap are those of `pallas_kernels.paged_attention`.
        """
        ...


@final
class PagedContext:
    """Keys and values go to the paged cache, and are read from it.

    Attributes:
      cache: as the last `attend` left it.
    """

    def __init__(
        self,
        layer: int | Array,
        rope: RopeTables | None,
        sliding_window: int | None,
        batch: AttentionBatch,
        cache: KVCache,
    ):
        self.cache = cache
        self._layer = layer
        self._rope = rope
        self._sliding_window = sliding_window
        self._batch = batch

    def attend(self, qkv: Array, *, scale: float | None, soft_cap: float | None) -> Array:
        """See `LayerContext`."""
        out, self.cache = self.cache.attend(
            self._layer,
            qkv,
            self._rope,
            self._batch,
            sliding_window=self._sliding_window,
            scale=scale,
            soft_cap=soft_cap,
        )
        return out


@final
class WholeContext:
    """Sequences of one length, each seen from its first token on; differentiable.

    Tokens are those of all sequences, one after the other.
    """

    def __init__(self, length: int, rope: RopeTables | None, sliding_window: int | None):
        self._length = length
        self._rope = rope
        self._sliding_window = sliding_window

    def attend(self, qkv: Array, *, scale: float | None, soft_cap: float | None) -> Array:
        """See `LayerContext`."""
        tokens, kv_heads, columns, head_dim = qkv.shape
        length, group = self._length, columns - 2
        rotated = qkv[:, :, : group + 1]
        if self._rope is not None:
            rotated = apply_rope(rotated, self._rope)
        grouped = rotated[:, :, :group].reshape(-1, length, kv_heads, group, head_dim)
        k, v = (
            x.reshape(-1, length, kv_heads, head_dim)
            for x in (rotated[:, :, group], qkv[:, :, group + 1])
        )
        logits = jnp.einsum("bqkgd,bskd->bkgqs", grouped, k, preferred_element_type=jnp.float32) * (
            head_dim**-0.5 if scale is None else scale
        )
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        back = jnp.arange(length)[:, None] - jnp.arange(length)
        seen = (
            back >= 0
            if self._sliding_window is None
            else ((back >= 0) & (back < self._sliding_window))
        )
        weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1).astype(v.dtype)
        return jnp.einsum("bkgqs,bskd->bqkgd", weights, v).reshape(tokens, -1, head_dim)
