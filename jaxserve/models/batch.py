"""What a decoder is called with besides its tokens: where they stand and where their KV goes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxserve.models.config import DecoderConfig
from pallas_kernels import RopeTables, Rows, paged_attention, rotate_and_write
from pallas_kernels.kv_write import IMPLEMENTATIONS as WRITERS
from pallas_kernels.paged_attention import Plan
from sharding.shards import TENSOR, over_tensor


@final
@partial(
    jax.tree_util.register_dataclass,
    data_fields=("positions", "page", "offset", "rows", "plan"),
    meta_fields=("max_query_length", "implementation"),
)
@dataclass(frozen=True)
class AttentionBatch:
    """Positions, KV destinations and rows of a flat ragged batch.

    Attributes:
      positions: int32 [tokens].
      page, offset: int32 [tokens], where each token's KV is written; page 0 for padding.
      rows: see `pallas_kernels.Rows`.
      max_query_length: static; 1 for a pure decode batch, None otherwise.
      plan: of the rows, for kernels that work through one.
      implementation: of attention, and of what writes for it where that has one of this name; None
        for the platform's choice.
    """

    positions: jax.Array
    page: jax.Array
    offset: jax.Array
    rows: Rows
    max_query_length: int | None
    plan: Plan | None = None
    implementation: Any = None


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer, in pages.

    Either one buffer with all layers or one buffer a layer: the platform's choice, made where the
    cache is created and nowhere else.

    Attributes:
      k_pages, v_pages: tuples of [layers in the buffer, pages, kv_heads, page_size, head_dim].
    """

    k_pages: tuple[jax.Array, ...]
    v_pages: tuple[jax.Array, ...]

    def attend(
        self,
        layer: int | jax.Array,
        qkv: jax.Array,
        rope: RopeTables | None,
        batch: AttentionBatch,
        **options: Any,
    ) -> tuple[jax.Array, KVCache]:
        """Write this step's keys and values, and attend with its queries.

        `qkv` [tokens, kv_heads, group + 2, head_dim] has of each KV head its queries, its key and
        its value, not rotated yet. Returns [tokens, q_heads, head_dim] and the cache with the new
        keys and values. A traced `layer` (scanned layers) needs the single-buffer form. `options`
        go to `paged_attention`.

        Under a mesh whose `tensor` axis is larger than one, every shard works on its own heads. A
        cache with more KV heads than `qkv` has (fewer than shards) holds copies of each.
        """
        buffer, index = self._place(layer)
        copies = self.k_pages[buffer].shape[2] // qkv.shape[1]
        if copies > 1:
            qkv = _copied_heads(qkv, copies)
        heads, pages, whole = P(None, TENSOR), P(None, None, TENSOR), P()
        attend = over_tensor(
            partial(_write_and_attend, **options),
            in_specs=(heads, whole, pages, pages, whole, whole),
            out_specs=(heads, pages, pages),
        )
        out, k_pages, v_pages = attend(
            qkv, rope, self.k_pages[buffer], self.v_pages[buffer], jnp.asarray(index), batch
        )
        return out, KVCache(
            _replaced(self.k_pages, buffer, k_pages), _replaced(self.v_pages, buffer, v_pages)
        )

    def _place(self, layer: int | jax.Array) -> tuple[int, int | jax.Array]:
        """Which buffer a layer lies in, and where in it."""
        if len(self.k_pages) == 1:
            return 0, layer
        if not isinstance(layer, int):
            raise TypeError("a traced layer needs a cache with one buffer for all layers")
        return layer, 0


def _copied_heads(qkv: jax.Array, copies: int) -> jax.Array:
    """Each KV head so often, with a share of its queries."""
    tokens, kv_heads, columns, head_dim = qkv.shape
    group = columns - 2
    q = qkv[:, :, :group].reshape(tokens, kv_heads * copies, group // copies, head_dim)
    return jnp.concatenate([q, jnp.repeat(qkv[:, :, group:], copies, axis=1)], axis=2)


def _write_and_attend(
    qkv: jax.Array,
    rope: RopeTables | None,
    k_pages: jax.Array,
    v_pages: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    asked = batch.implementation
    q, k_pages, v_pages, _, _ = rotate_and_write(
        *(qkv, rope, k_pages, v_pages, layer, batch.page, batch.offset),
        implementation=asked if asked in WRITERS else None,
    )
    out = paged_attention(
        q,
        k_pages,
        v_pages,
        layer,
        batch.rows,
        max_query_length=batch.max_query_length,
        plan=batch.plan,
        implementation=batch.implementation,
        **options,
    )
    return out, k_pages, v_pages


def _replaced(buffers: tuple[jax.Array, ...], index: int, new: jax.Array) -> tuple[jax.Array, ...]:
    return (*buffers[:index], new, *buffers[index + 1 :])


def empty_cache(
    config: DecoderConfig,
    num_pages: int,
    page_size: int,
    dtype: jax.typing.DTypeLike,
    layer_layout: Literal["unrolled", "scanned"],
    *,
    num_shards: int = 1,
) -> KVCache:
    """A cache of zeros: one buffer a layer when `unrolled`, one for all when `scanned`.

    `num_pages` counts the null page (page 0). With more shards than KV heads, each head is there
    as often as shards need it. Abstract under `jax.eval_shape`.
    """
    buffers, layers = (
        (config.num_layers, 1) if layer_layout == "unrolled" else (1, config.num_layers)
    )
    heads = max(config.num_kv_heads, num_shards)
    shape = (layers, num_pages, heads, page_size, config.head_dim)
    return KVCache(
        k_pages=tuple(jnp.zeros(shape, dtype) for _ in range(buffers)),
        v_pages=tuple(jnp.zeros(shape, dtype) for _ in range(buffers)),
    )
