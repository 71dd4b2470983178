"""The arguments of a decoder except its tokens: positions, paged KV, and states in slots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Float32, Int32, Real, Shaped

from jaxserve.core.options import KV_DTYPES
from jaxserve.kernels import RopeTables, Rows, paged_attention, rotate_and_write, scatter_pages
from jaxserve.kernels.kv_write import IMPLEMENTATIONS as WRITERS
from jaxserve.kernels.paged_attention import Plan
from jaxserve.models.config import DecoderConfig, LayerKind
from jaxserve.models.recurrence import Advance, Arrays, Inputs, advance_rows
from jaxserve.sharding.shards import TENSOR, over_tensor

# How arrays are split over a mesh: heads [tokens, heads, ...], pages [layers, pages, heads, ...].
_HEADS, _PAGES = P(None, TENSOR), P(None, None, TENSOR)


@final
@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        *("positions", "page", "offset", "rows", "plan", "adapter"),
        *("cross_rows", "distance_bias", "slot", "valid"),
    ),
    meta_fields=("max_query_length", "implementation", "is_proposed", "places"),
)
@dataclass(frozen=True)
class AttentionBatch:
    """Positions, KV destinations and rows of a flat ragged batch."""

    positions: Int32[Array, " tokens"]  # the place of each token in its sequence
    # page, offset: where each token's KV is written; page 0 for padding. None for a batch of cross
    # attention, which writes nothing. [tokens, tables] with several page tables.
    page: Int32[Array, " tokens *tables"] | None
    offset: Int32[Array, " tokens"] | None
    rows: Rows  # which keys each token sees; `models.attention` makes them
    max_query_length: int | None  # static bound, 1 for a pure decode batch; None if not known
    plan: Plan | None = None  # the plan of the rows, for kernels that use one
    # The implementation of attention, and of the write if one has this name; None for the
    # platform's choice.
    implementation: Any = None
    # The adapter of each token, -1 for none; None if no token has one.
    adapter: Int32[Array, " tokens"] | None = None
    # Which of the encoder's keys each token sees; None for models without an encoder.
    cross_rows: Rows | None = None
    # Of `paged_attention`, for all layers; None for models without one.
    distance_bias: Float32[Array, "q_heads distances"] | None = None
    # The slot of each row, which has its states; None for models without recurrent layers.
    slot: Int32[Array, " rows"] | None = None
    # Whether each token counts; products leave the others out if they can. None: all count.
    valid: Bool[Array, " tokens"] | None = None
    # Whether some tokens may not count in the end: recurrent layers leave their states as they are.
    is_proposed: bool = False
    # The page table and the cache's buffer of each layer with keys and values; empty if one table
    # serves all layers and each has its own buffer (`PageLayout`).
    places: tuple[tuple[int, int], ...] = ()

    def by_table(self) -> list[AttentionBatch]:
        """Return the batch of each page table."""
        if not self.places:
            return [self]
        assert self.page is not None, "a batch that writes nothing"
        num, page_table = self.page.shape[1], self.rows.page_table
        return [
            replace(
                self,
                page=self.page[:, table],
                rows=replace(self.rows, page_table=page_table[:, table::num]),
                places=(),
            )
            for table in range(num)
        ]


def in_chunks(rows: Rows, chunk: int, page_size: int, num_tokens: int) -> Rows:
    """Return rows whose queries see the keys of their own chunks of the sequences only.

    A row becomes one for each chunk that it has tokens in, over that chunk's pages. `num_tokens` is
    the most that a row has; with one, rows stay in their places.

    Raises:
      NotImplementedError: pages do not divide a chunk.
    """
    if chunk % page_size:
        raise NotImplementedError(
            f"attention in chunks of {chunk} tokens over pages of {page_size}; pass a page_size "
            "that divides the chunk"
        )
    # A row that begins at the end of a chunk has one token there.
    pieces = 1 if num_tokens == 1 else (num_tokens + chunk - 2) // chunk + 1
    piece = jnp.arange(pieces, dtype=jnp.int32)
    first = rows.first_position[:, None]
    base = (first // chunk + piece) * chunk  # [rows, pieces]
    begin = jnp.maximum(first, base)
    end = jnp.minimum(first + rows.query_length[:, None], base + chunk)
    page = base[:, :, None] // page_size + jnp.arange(chunk // page_size)
    page = jnp.minimum(page, rows.page_table.shape[1] - 1)
    table = jnp.take_along_axis(rows.page_table[:, None], page, axis=2)
    context = jnp.clip(rows.context_length[:, None] - base, 0, chunk)
    return Rows(
        query_start=(rows.query_start[:, None] + begin - first).reshape(-1),
        query_length=jnp.maximum(end - begin, 0).reshape(-1),
        first_position=(begin - base).reshape(-1),
        context_length=context.reshape(-1),
        page_table=table.reshape(-1, table.shape[-1]),
    )


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of attention layers, in pages; states of recurrent layers, in slots.

    The cache is one buffer with all layers, or one buffer a layer. The platform decides which when
    the cache is created. Layers are numbered among those of their kind.
    """

    # k_pages, v_pages: `layers` are those in the buffer.
    k_pages: tuple[Real[Array, "layers pages kv_heads page_size head_dim"], ...]
    v_pages: tuple[Real[Array, "layers pages kv_heads page_size head_dim"], ...]
    # k_scales, v_scales: the scales of pages in eight bits (`jaxserve.kernels.quantize`); empty for
    # other pages.
    k_scales: tuple[Float32[Array, "layers pages kv_heads page_size"], ...] = ()
    v_scales: tuple[Float32[Array, "layers pages kv_heads page_size"], ...] = ()
    # The arrays of the states of recurrent layers, by name; empty without such layers.
    states: Mapping[str, tuple[Shaped[Array, "layers slots ..."], ...]] = field(
        default_factory=dict
    )
    # After a batch that `is_proposed`, the inputs of each call of `recur`, for
    # `Decoder.with_states`; those of scanned layers are stacked.
    inputs: tuple[Inputs, ...] = ()

    @property
    def num_pages(self) -> int:
        return self.k_pages[0].shape[1]

    @property
    def page_size(self) -> int:
        return self.k_pages[0].shape[3]

    @property
    def pages(self) -> KVCache:
        return replace(self, states={})

    def layer(self, kind: LayerKind, index: int) -> KVCache:
        """Return the part of the cache for a layer with its own buffer."""
        own = self.buffer(index) if kind in ("attention", "both") else KVCache((), ())
        if kind in ("recurrent", "both"):
            states = {name: each[index : index + 1] for name, each in self.states.items()}
            own = replace(own, states=states)
        return own

    def with_layer(self, kind: LayerKind, index: int, part: KVCache) -> KVCache:
        new = self.with_buffer(index, part) if kind in ("attention", "both") else self
        if kind in ("recurrent", "both"):
            states = {
                name: (*each[:index], *part.states[name], *each[index + 1 :])
                for name, each in self.states.items()
            }
            inputs = (*self.inputs, *part.inputs)
            new = replace(new, states=states, inputs=inputs)
        return new

    def buffer(self, index: int) -> KVCache:
        own = (leaves[index : index + 1] for leaves in self._fields)
        return KVCache(*own, states={})

    def with_buffer(self, index: int, part: KVCache) -> KVCache:
        replaced = (
            (*leaves[:index], *new, *leaves[index + 1 :])
            for leaves, new in zip(self._fields, part._fields, strict=True)
        )
        return KVCache(*replaced, states=self.states, inputs=self.inputs)

    def with_pages(
        self, layer: int | Int32[Array, ""], target: Int32[Array, " count"], values: KVCache
    ) -> KVCache:
        """Return the cache with `count` pages of one layer replaced, in place if it is donated.

        `target` has page ids; an id past the end skips that page.
        """
        buffer, index = self._place(layer)
        put = over_tensor(_put_pages, in_specs=(_PAGES, P(), P(), _PAGES), out_specs=_PAGES)
        return self.with_buffer(
            buffer, put(self.buffer(buffer), jnp.asarray(index), target, values)
        )

    def attend(
        self,
        layer: int | Int32[Array, ""],  # a traced one (scanned layers) needs the single-buffer form
        qkv: Float[Array, "tokens kv_heads columns head_dim"],
        rope: RopeTables | None,
        batch: AttentionBatch,
        *,
        alibi_slopes: Sequence[float] | None = None,
        sinks: Float[Array, " q_heads"] | None = None,
        **options: Any,
    ) -> tuple[Float[Array, "tokens q_heads head_dim"], KVCache]:
        """Write this step's keys and values, and attend with its queries.

        Under a mesh whose `tensor` axis is larger than one, every shard works on its own heads. A
        cache with more KV heads than `qkv` has (fewer than shards) holds copies of each.

        Args:
          qkv: for each KV head its queries, its key and its value, not rotated yet.
          alibi_slopes, sinks, options: of `paged_attention`.

        Returns:
          The attention output, and the cache with the new keys and values.
        """
        buffer, index = self._place(layer)
        copies = self.k_pages[buffer].shape[2] // qkv.shape[1]
        if copies > 1:
            qkv = _copied_heads(qkv, copies)
        attend = over_tensor(
            partial(_write_and_read, **options),
            in_specs=(_HEADS, P(), _PAGES, P(), P(), *(P(TENSOR),) * 3),
            out_specs=(_HEADS, _PAGES),
        )
        bias = batch.distance_bias
        slopes = None if alibi_slopes is None else jnp.asarray(alibi_slopes, jnp.float32)
        batch = replace(batch, distance_bias=None, cross_rows=None, slot=None)
        by_head = bias, slopes, sinks
        out, part = attend(qkv, rope, self.buffer(buffer), jnp.asarray(index), batch, *by_head)
        return out, self.with_buffer(buffer, part)

    def write(
        self,
        layer: int | Int32[Array, ""],
        kv: Float[Array, "tokens kv_heads 2 head_dim"],
        batch: AttentionBatch,
    ) -> KVCache:
        buffer, index = self._place(layer)
        kv = jnp.repeat(kv, self.k_pages[buffer].shape[2] // kv.shape[1], axis=1)
        qkv = jnp.concatenate([jnp.zeros_like(kv[:, :, :1]), kv], axis=2)
        write = over_tensor(
            _write, in_specs=(_HEADS, P(), _PAGES, P(), P()), out_specs=(_HEADS, _PAGES)
        )
        _, part = write(qkv, None, self.buffer(buffer), jnp.asarray(index), batch)
        return self.with_buffer(buffer, part)

    def read(
        self,
        layer: int | Int32[Array, ""],
        q: Float[Array, "tokens q_heads head_dim"],
        batch: AttentionBatch,
        **options: Any,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        """Attend with `q`, as it is, and `paged_attention`'s `options`; write nothing."""
        buffer, index = self._place(layer)
        read = over_tensor(
            partial(_read, **options), in_specs=(_HEADS, _PAGES, P(), P()), out_specs=_HEADS
        )
        return read(q, self.buffer(buffer), jnp.asarray(index), batch)

    def recur(
        self,
        layer: int | Int32[Array, ""],
        advance: Advance,
        inputs: Inputs,
        batch: AttentionBatch,
        names: Collection[str],  # of the state's arrays that `advance` reads and returns
    ) -> tuple[Float[Array, "tokens ..."], KVCache]:
        """Advance a batch's sequences in a recurrent layer; return outputs and the new cache.

        A batch that `is_proposed` adds the inputs to the cache, and changes no state.
        """
        assert batch.slot is not None, "a batch of a model without recurrent layers"
        buffer, index = (0, layer) if len(self.states[min(names)]) == 1 else (layer, 0)
        if not isinstance(buffer, int):
            raise TypeError("a traced layer needs a cache with one buffer for all layers")
        out, own = advance_rows(
            advance,
            inputs,
            {name: self.states[name][buffer] for name in names},
            index,
            batch.slot,
            batch.rows,
            most=batch.max_query_length,
            writes=not batch.is_proposed,
        )
        if batch.is_proposed:
            return out, replace(self, inputs=(*self.inputs, inputs))
        states = {
            name: (*each[:buffer], own[name], *each[buffer + 1 :]) if name in own else each
            for name, each in self.states.items()
        }
        return out, replace(self, states=states)

    @property
    def _fields(self) -> tuple[tuple[Shaped[Array, "layers pages kv_heads ..."], ...], ...]:
        return self.k_pages, self.v_pages, self.k_scales, self.v_scales

    def _place(self, layer: int | Int32[Array, ""]) -> tuple[int, int | Int32[Array, ""]]:
        """Return the buffer of a layer, and its place there."""
        if len(self.k_pages) == 1:
            return 0, layer
        if not isinstance(layer, int):
            raise TypeError("a traced layer needs a cache with one buffer for all layers")
        return layer, 0


def _put_pages(
    cache: KVCache,  # of one buffer
    layer: Int32[Array, ""],  # in the buffer
    target: Int32[Array, " count"],
    values: KVCache,  # of one layer
) -> KVCache:
    num_layers, num_pages = cache.k_pages[0].shape[:2]
    skip = num_layers * num_pages
    place = jnp.where(target < num_pages, layer * num_pages + target, skip)
    flat = jax.tree.map(lambda leaf: leaf.reshape(1, skip, *leaf.shape[2:]), cache)
    put = scatter_pages(flat, place, values)
    return jax.tree.map(lambda new, old: new.reshape(old.shape), put, cache)


def _copied_heads(
    qkv: Float[Array, "tokens kv_heads columns head_dim"], copies: int
) -> Float[Array, "tokens copied_heads fewer_columns head_dim"]:
    """Repeat each KV head `copies` times, each copy with a share of its queries."""
    tokens, kv_heads, columns, head_dim = qkv.shape
    group = columns - 2
    q = qkv[:, :, :group].reshape(tokens, kv_heads * copies, group // copies, head_dim)
    return jnp.concatenate([q, jnp.repeat(qkv[:, :, group:], copies, axis=1)], axis=2)


def _write_and_read(
    qkv: Float[Array, "tokens kv_heads columns head_dim"],
    rope: RopeTables | None,
    cache: KVCache,  # of one buffer
    layer: Int32[Array, ""],  # in the buffer
    batch: AttentionBatch,
    distance_bias: Float32[Array, "q_heads distances"] | None,
    alibi_slopes: Float32[Array, " q_heads"] | None,
    sinks: Float[Array, " q_heads"] | None,
    **options: Any,
) -> tuple[Float[Array, "tokens q_heads head_dim"], KVCache]:
    q, cache = _write(qkv, rope, cache, layer, batch)
    by_head = dict(distance_bias=distance_bias, alibi_slopes=alibi_slopes, sinks=sinks)
    return _read(q, cache, layer, batch, **by_head, **options), cache


def _write(
    qkv: Float[Array, "tokens kv_heads columns head_dim"],
    rope: RopeTables | None,
    cache: KVCache,  # of one buffer
    layer: Int32[Array, ""],  # in the buffer
    batch: AttentionBatch,
) -> tuple[Float[Array, "tokens q_heads head_dim"], KVCache]:
    """Return rotated queries, and the cache with keys and values written."""
    if batch.page is None or batch.offset is None:
        raise ValueError("page and offset are None, which is for batches that write nothing")
    scales = {}
    if cache.k_scales:
        scales = {"k_scales": cache.k_scales[0], "v_scales": cache.v_scales[0]}
    q, *written = rotate_and_write(
        qkv,
        rope,
        cache.k_pages[0],
        cache.v_pages[0],
        layer,
        batch.page,
        batch.offset,
        **scales,
        implementation=batch.implementation if batch.implementation in WRITERS else None,
    )
    return q, KVCache(*(() if each is None else (each,) for each in written), states={})


def _read(
    q: Float[Array, "tokens q_heads head_dim"],
    cache: KVCache,  # of one buffer
    layer: Int32[Array, ""],  # in the buffer
    batch: AttentionBatch,
    **options: Any,
) -> Float[Array, "tokens q_heads head_dim"]:
    return paged_attention(
        q,
        cache.k_pages[0],
        cache.v_pages[0],
        layer,
        batch.rows,
        k_scales=cache.k_scales[0] if cache.k_scales else None,
        v_scales=cache.v_scales[0] if cache.v_scales else None,
        max_query_length=batch.max_query_length,
        plan=batch.plan,
        implementation=batch.implementation,
        **options,
    )


def empty_cache(
    config: DecoderConfig,
    num_pages: int,
    page_size: int,
    dtype: jax.typing.DTypeLike,
    layer_layout: Literal["unrolled", "scanned"],
    num_shards: int = 1,
    num_slots: int = 0,
    num_buffers: int | None = None,
    *,
    zeros: Callable[[tuple[int, ...], Any], Array] = jnp.zeros,
) -> KVCache:
    """Return a cache of zeros: one buffer a layer when `unrolled`, one for all when `scanned`.

    `num_pages` counts the null page (page 0). With more shards than KV heads, the cache has a copy
    of a head for each shard that needs it. A `dtype` of `KV_DTYPES` adds scales. `num_slots` is
    for states, and unused without recurrent layers. `num_buffers` is the number of layers in a
    page, if it has fewer than all (`PageLayout`). `zeros` makes a buffer from shape and dtype.
    """

    def split(num_layers: int) -> tuple[int, int]:
        return (num_layers, 1) if layer_layout == "unrolled" else (min(1, num_layers), num_layers)

    buffers, layers = split(num_buffers or config.num_attention_layers)
    heads = max(config.num_kv_heads, num_shards)
    shape = (layers, num_pages, heads, page_size, config.head_dim)
    scale_buffers = buffers if jnp.dtype(dtype).name in KV_DTYPES else 0

    def made(count: int, shape: tuple[int, ...], dtype: Any) -> tuple[Array, ...]:
        return tuple(zeros(shape, dtype) for _ in range(count))

    state_buffers, stacked = split(config.num_recurrent_layers)
    return KVCache(
        k_pages=made(buffers, shape, dtype),
        v_pages=made(buffers, shape, dtype),
        k_scales=made(scale_buffers, shape[:-1], jnp.float32),
        v_scales=made(scale_buffers, shape[:-1], jnp.float32),
        states={
            name: made(state_buffers, (stacked, num_slots, *own), kind)
            for name, (own, kind) in state_arrays(config).items()
        },
    )


def state_arrays(config: DecoderConfig) -> Arrays:
    """Return shape and dtype of each array that a recurrent layer keeps of a sequence."""
    return {} if config.recurrence is None else config.recurrence.arrays(config.dtype)


def split_states(config: DecoderConfig, num_shards: int) -> dict[str, bool]:
    """Return of which arrays of a state each tensor shard has a part, along the first axis.

    These are the memories, whose heads or channels are independent, if the shards divide them.
    """
    return {
        name: name == "memory" and shape[0] % num_shards == 0
        for name, (shape, _) in state_arrays(config).items()
    }


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class IncomingPages:
    """Pages whose keys and values a layer gets just before it attends (thesis, section 3.4.3.3)."""

    target: Int32[Array, " count"]  # where in the cache each goes; past its end to skip
    values: KVCache  # as the cache, but of `count` pages, in the host's memory

    def fetch(self, layer: int | Int32[Array, ""]) -> KVCache:
        """Start to copy a layer's part to the device, into a buffer of its own.

        A computation that does not use it need not wait for it. A traced layer past the last one
        stands for the last one.
        """
        part = self.values
        if len(part.k_pages) == 1:
            part = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, layer, 1), part)
        else:
            assert isinstance(layer, int), "a traced layer needs one buffer for all layers"
            part = part.buffer(layer)
        return jax.device_put(part, jax.memory.Space.Device)

    def put(self, cache: KVCache, layer: int | Int32[Array, ""], fetched: KVCache) -> KVCache:
        """Return the cache with the pages fetched for a layer."""
        return cache.with_pages(layer, self.target, fetched)
