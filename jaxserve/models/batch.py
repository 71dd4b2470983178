"""What a decoder is called with besides its tokens: where they stand and where their KV goes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxserve.core.options import KV_DTYPES
from jaxserve.models.config import DecoderConfig
from pallas_kernels import RopeTables, Rows, paged_attention, rotate_and_write, scatter_pages
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
      k_scales, v_scales: of pages in eight bits (`pallas_kernels.quantize`), tuples of float32
        [layers in the buffer, pages, kv_heads, page_size]; empty for others.
    """

    k_pages: tuple[jax.Array, ...]
    v_pages: tuple[jax.Array, ...]
    k_scales: tuple[jax.Array, ...] = ()
    v_scales: tuple[jax.Array, ...] = ()

    @property
    def num_pages(self) -> int:
        return self.k_pages[0].shape[1]

    def buffer(self, index: int) -> KVCache:
        """The part of the cache that lies in one buffer."""
        own = (leaves[index : index + 1] for leaves in self._fields)
        return KVCache(*own)

    def with_buffer(self, index: int, part: KVCache) -> KVCache:
        """The cache with another part in that place."""
        replaced = (
            (*leaves[:index], *new, *leaves[index + 1 :])
            for leaves, new in zip(self._fields, part._fields, strict=True)
        )
        return KVCache(*replaced)

    def with_pages(self, layer: int | jax.Array, target: jax.Array, values: KVCache) -> KVCache:
        """The cache with pages of one layer put into it, in place where it is donated.

        Args:
          target: int32 [count]; past the end to skip.
          values: of one layer, `count` pages in one buffer.
        """
        buffer, index = self._place(layer)
        pages = P(None, None, TENSOR)
        put = over_tensor(_put_pages, in_specs=(pages, P(), P(), pages), out_specs=pages)
        return self.with_buffer(
            buffer, put(self.buffer(buffer), jnp.asarray(index), target, values)
        )

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
            in_specs=(heads, whole, pages, whole, whole),
            out_specs=(heads, pages),
        )
        out, part = attend(qkv, rope, self.buffer(buffer), jnp.asarray(index), batch)
        return out, self.with_buffer(buffer, part)

    @property
    def _fields(self) -> tuple[tuple[jax.Array, ...], ...]:
        return self.k_pages, self.v_pages, self.k_scales, self.v_scales

    def _place(self, layer: int | jax.Array) -> tuple[int, int | jax.Array]:
        """Which buffer a layer lies in, and where in it."""
        if len(self.k_pages) == 1:
            return 0, layer
        if not isinstance(layer, int):
            raise TypeError("a traced layer needs a cache with one buffer for all layers")
        return layer, 0


def _put_pages(
    cache: KVCache,  # of one buffer
    layer: jax.Array,  # in the buffer
    target: jax.Array,  # int32 [count]
    values: KVCache,  # of one layer
) -> KVCache:
    num_layers, num_pages = cache.k_pages[0].shape[:2]
    skip = num_layers * num_pages
    place = jnp.where(target < num_pages, layer * num_pages + target, skip)
    flat = jax.tree.map(lambda leaf: leaf.reshape(1, skip, *leaf.shape[2:]), cache)
    put = scatter_pages(flat, place, values)
    return jax.tree.map(lambda new, old: new.reshape(old.shape), put, cache)


def _copied_heads(qkv: jax.Array, copies: int) -> jax.Array:
    """Each KV head so often, with a share of its queries."""
    tokens, kv_heads, columns, head_dim = qkv.shape
    group = columns - 2
    q = qkv[:, :, :group].reshape(tokens, kv_heads * copies, group // copies, head_dim)
    return jnp.concatenate([q, jnp.repeat(qkv[:, :, group:], copies, axis=1)], axis=2)


def _write_and_attend(
    qkv: jax.Array,
    rope: RopeTables | None,
    cache: KVCache,  # of one buffer
    layer: jax.Array,  # in the buffer
    batch: AttentionBatch,
    **options: Any,
) -> tuple[jax.Array, KVCache]:
    asked = batch.implementation
    scales = {}
    if cache.k_scales:
        scales = {"k_scales": cache.k_scales[0], "v_scales": cache.v_scales[0]}
    q, k_pages, v_pages, k_scales, v_scales = rotate_and_write(
        *(qkv, rope, cache.k_pages[0], cache.v_pages[0], layer, batch.page, batch.offset),
        **scales,
        implementation=asked if asked in WRITERS else None,
    )
    out = paged_attention(
        q,
        k_pages,
        v_pages,
        layer,
        batch.rows,
        k_scales=k_scales,
        v_scales=v_scales,
        max_query_length=batch.max_query_length,
        plan=batch.plan,
        implementation=batch.implementation,
        **options,
    )
    written = (k_pages, v_pages, k_scales, v_scales)
    return out, KVCache(*(() if each is None else (each,) for each in written))


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
    as often as shards need it. A `dtype` of `KV_DTYPES` brings scales. Abstract under
    `jax.eval_shape`.
    """
    buffers, layers = (
        (config.num_layers, 1) if layer_layout == "unrolled" else (1, config.num_layers)
    )
    heads = max(config.num_kv_heads, num_shards)
    shape = (layers, num_pages, heads, page_size, config.head_dim)
    scale_buffers = buffers if jnp.dtype(dtype).name in KV_DTYPES else 0

    def zeros(count: int, shape: tuple[int, ...], dtype: Any) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(shape, dtype) for _ in range(count))

    return KVCache(
        k_pages=zeros(buffers, shape, dtype),
        v_pages=zeros(buffers, shape, dtype),
        k_scales=zeros(scale_buffers, shape[:-1], jnp.float32),
        v_scales=zeros(scale_buffers, shape[:-1], jnp.float32),
    )
