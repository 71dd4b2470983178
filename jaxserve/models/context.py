"""The context of a layer: its tokens' adapters, and the earlier tokens that they may see.

`PagedContext` serves from a paged cache and from states in slots, `WholeContext` computes whole
sequences for training, and `CrossContext` reads the encoder's keys and values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.kernels import RopeTables, apply_rope, whole_attention
from jaxserve.models.batch import AttentionBatch, KVCache, in_chunks
from jaxserve.models.recurrence import Advance, Arrays, Inputs, advance_whole


class LayerContext(Protocol):
    """The context of one layer in one trace; each layer gets a new one."""

    @property
    def adapter(self) -> Int32[Array, " tokens"] | None:
        """The adapter of each token, -1 for none; None if no token has one."""
        ...

    @property
    def layer_input(self) -> Float[Array, "tokens width"] | None:
        """The tokens' own input of this layer (`Decoder._layer_inputs`); None without one."""
        ...

    def positions(self, num_tokens: int) -> Int32[Array, " tokens"]:
        """Return the place of each of the step's tokens in its sequence."""
        ...

    def attend(
        self,
        qkv: Float[Array, "tokens kv_heads columns head_dim"],
        *,
        scale: float | None,
        soft_cap: float | None,
        alibi_slopes: tuple[float, ...] | None = None,
        sinks: Float[Array, " q_heads"] | None = None,
        is_rotated: bool = False,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        """Return attention for the queries in `qkv`: each KV head's queries, key and value.

        This rotates queries and keys if positions are rotary, unless they are rotated already.
        `scale`, `soft_cap`, `alibi_slopes` and `sinks` are those of
        `jaxserve.kernels.paged_attention`.
        """
        ...

    def rotated(
        self, x: Float[Array, "tokens kv_heads columns head_dim"]
    ) -> Float[Array, "tokens kv_heads columns head_dim"]:
        """Return queries or keys rotated to their positions; `x` if positions are not rotary."""
        ...

    def attend_shared(
        self, q: Float[Array, "tokens kv_heads columns head_dim"], *, scale: float | None
    ) -> Float[Array, "tokens q_heads head_dim"]:
        """Return attention for queries over the keys and values of this layer's `kv_sources`."""
        ...

    def recur(self, advance: Advance, arrays: Arrays, inputs: Inputs) -> Float[Array, "tokens ..."]:
        """Return the outputs of `advance`, called for runs of tokens of one sequence each.

        `arrays` are those of the state that `advance` reads and returns. The mixer has both in
        `advances`.
        """
        ...

    def cross(self) -> CrossContext:
        """Return the context of cross attention in the same layer, to read from."""
        ...


@final
class PagedContext:
    """A context that writes keys and values, or states, to the cache and reads them from it.

    Attention is causal or bidirectional, as the batch's rows are. `cache` has the writes of the
    last `attend` or `recur`.
    """

    def __init__(
        self,
        layer: int | Int32[Array, ""],
        rope: RopeTables | None,
        sliding_window: int | None,
        batch: AttentionBatch,
        cache: KVCache,
        chunk: int | None = None,  # see `DecoderConfig.attention_chunks`
        layer_input: Float[Array, "tokens width"] | None = None,
    ):
        self.cache = cache
        self.layer_input = layer_input
        self._chunk = chunk
        self._layer = layer
        self._rope = rope
        self._sliding_window = sliding_window
        self._batch = batch

    @property
    def adapter(self) -> Int32[Array, " tokens"] | None:
        return self._batch.adapter

    def positions(self, num_tokens: int) -> Int32[Array, " tokens"]:
        return self._batch.positions

    def attend(
        self,
        qkv: Float[Array, "tokens kv_heads columns head_dim"],
        *,
        scale: float | None,
        soft_cap: float | None,
        alibi_slopes: tuple[float, ...] | None = None,
        sinks: Float[Array, " q_heads"] | None = None,
        is_rotated: bool = False,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        out, self.cache = self.cache.attend(
            self._layer,
            qkv,
            None if is_rotated else self._rope,
            self._chunked(qkv.shape[0]),
            alibi_slopes=alibi_slopes,
            sliding_window=self._sliding_window,
            scale=scale,
            soft_cap=soft_cap,
            sinks=sinks,
        )
        return out

    def rotated(
        self, x: Float[Array, "tokens kv_heads columns head_dim"]
    ) -> Float[Array, "tokens kv_heads columns head_dim"]:
        return x if self._rope is None else apply_rope(x, self._rope)

    def attend_shared(
        self, q: Float[Array, "tokens kv_heads columns head_dim"], *, scale: float | None
    ) -> Float[Array, "tokens q_heads head_dim"]:
        return self.cache.read(
            self._layer,
            self.rotated(q).reshape(len(q), -1, q.shape[-1]),
            self._chunked(len(q)),
            sliding_window=self._sliding_window,
            scale=scale,
        )

    def recur(self, advance: Advance, arrays: Arrays, inputs: Inputs) -> Float[Array, "tokens ..."]:
        out, self.cache = self.cache.recur(self._layer, advance, inputs, self._batch, arrays)
        return out

    def _chunked(self, num_tokens: int) -> AttentionBatch:
        """Return the batch with rows that see their own chunks; the plan is of the whole rows."""
        batch, chunk = self._batch, self._chunk
        page_size = self.cache.page_size
        if chunk is None or batch.rows.page_table.shape[1] * page_size <= chunk:
            return batch
        longest = min(batch.max_query_length or num_tokens, num_tokens)
        return replace(batch, rows=in_chunks(batch.rows, chunk, page_size, longest), plan=None)

    def cross(self) -> CrossContext:
        batch = self._batch
        assert batch.cross_rows is not None, "a batch of a model without an encoder"
        batch = replace(batch, rows=batch.cross_rows, cross_rows=None, distance_bias=None)
        return CrossContext(self._layer, batch, self.cache)


@final
class CrossContext:
    """A context of cross attention: the encoder's keys and values, in separate pages.

    Two steps use one: the encoder's, whose batch says where each of its tokens is written, and the
    decoder's, whose batch has `attention.cross_rows`. `cache` has the writes of the last `write`.
    """

    def __init__(self, layer: int | Int32[Array, ""], batch: AttentionBatch, cache: KVCache):
        self.cache = cache
        self._layer = layer
        self._batch = batch

    @property
    def adapter(self) -> Int32[Array, " tokens"] | None:
        return self._batch.adapter

    def write(self, kv: Float[Array, "tokens kv_heads 2 head_dim"]) -> None:
        self.cache = self.cache.write(self._layer, kv, self._batch)

    def attend(
        self,
        q: Float[Array, "tokens q_heads head_dim"],
        *,
        scale: float | None,
        soft_cap: float | None,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        """Return the attention of `q`; write nothing."""
        return self.cache.read(self._layer, q, self._batch, scale=scale, soft_cap=soft_cap)


@final
class WholeContext:
    """A context of whole sequences of one length, causal, without a cache, differentiable.

    The tokens are those of all sequences, one sequence after the other. None has an adapter.
    """

    adapter: Int32[Array, " tokens"] | None = None

    def __init__(
        self,
        length: int,
        rope: RopeTables | None,
        sliding_window: int | None,
        chunk: int | None = None,  # see `DecoderConfig.attention_chunks`
        *,
        layer_input: Float[Array, "tokens width"] | None = None,
        source: WholeContext | None = None,  # of the layer whose keys and values are read
    ):
        self.layer_input = layer_input
        self._source = source
        self._kv: Float[Array, "tokens kv_heads 2 head_dim"] | None = None
        self._length = length
        self._chunk = chunk
        self._rope = rope
        self._sliding_window = sliding_window

    def positions(self, num_tokens: int) -> Int32[Array, " tokens"]:
        return jnp.arange(num_tokens) % self._length

    def attend(
        self,
        qkv: Float[Array, "tokens kv_heads columns head_dim"],
        *,
        scale: float | None,
        soft_cap: float | None,
        alibi_slopes: tuple[float, ...] | None = None,
        sinks: Float[Array, " q_heads"] | None = None,
        is_rotated: bool = False,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        self._kv = qkv[:, :, -2:]
        chunk = self._length if self._chunk is None else min(self._chunk, self._length)
        num_sequences, missing = qkv.shape[0] // self._length, -self._length % chunk

        def padded(x: Float[Array, " tokens *shape"]) -> Float[Array, " padded *shape"]:
            """Return the tokens of whole chunks; each chunk is like a sequence of its own."""
            x = x.reshape(num_sequences, self._length, *x.shape[1:])
            x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
            return x.reshape(-1, *x.shape[2:])

        rope = None if is_rotated else self._rope
        if missing:
            qkv, rope = padded(qkv), jax.tree.map(padded, rope)
        out = whole_attention(
            qkv,
            rope,
            length=chunk,
            scale=scale,
            sliding_window=self._sliding_window,
            soft_cap=soft_cap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
        )
        if not missing:
            return out
        out = out.reshape(num_sequences, self._length + missing, *out.shape[1:])
        return out[:, : self._length].reshape(-1, *out.shape[2:])

    def rotated(
        self, x: Float[Array, "tokens kv_heads columns head_dim"]
    ) -> Float[Array, "tokens kv_heads columns head_dim"]:
        return x if self._rope is None else apply_rope(x, self._rope)

    def attend_shared(
        self, q: Float[Array, "tokens kv_heads columns head_dim"], *, scale: float | None
    ) -> Float[Array, "tokens q_heads head_dim"]:
        assert self._source is not None and self._source._kv is not None, "a layer with its own"
        qkv = jnp.concatenate([q, self._source._kv], axis=2)
        return self.attend(qkv, scale=scale, soft_cap=None)

    def recur(self, advance: Advance, arrays: Arrays, inputs: Inputs) -> Float[Array, "tokens ..."]:
        return advance_whole(advance, inputs, self._length, arrays)

    def cross(self) -> CrossContext:
        raise NotImplementedError("cross attention of whole sequences")
