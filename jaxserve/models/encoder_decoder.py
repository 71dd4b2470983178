"""Encoder-decoder models: the encoder, and a decoder that also attends to the encoder's output.

The encoder reads whole prompts, several of them in one flat batch.

A sequence's positions are those of the encoder's prompt, then padding to the end of a page, then
those of the decoder. The pages of prompt positions hold, for each decoder layer, the keys and
values of cross attention to the encoder's output. The pages after them hold the decoder's
own keys and values. So one page table has both, and the decoder's positions begin with a page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Protocol, cast, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.attention import CrossAttention
from jaxserve.models.batch import AttentionBatch, IncomingPages, KVCache
from jaxserve.models.config import DecoderConfig
from jaxserve.models.context import CrossContext, LayerContext
from jaxserve.models.decoder import Decoder, LayerLayout, Part, Tap
from jaxserve.models.layers import Block
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.recurrence import Advance, Arrays, Inputs


def causal_biases(
    table: Float[Array, "buckets heads"], max_distance: int
) -> Float[Array, "heads distances"]:
    """Return the biases of distances 0, 1, ... `max_distance` back; longer ones have the last."""
    distance = np.arange(max_distance + 1)
    return table[_buckets(distance, table.shape[0], max_distance)].T


def both_ways_biases(
    table: Float[Array, "buckets heads"], max_distance: int
) -> Float[Array, "heads offsets"]:
    """Return the biases of a key's position minus its query's, -`max_distance` to `max_distance`.

    Half of the buckets are for keys after the query.
    """
    offset = np.arange(-max_distance, max_distance + 1)
    half = table.shape[0] // 2
    buckets = _buckets(np.abs(offset), half, max_distance) + half * (offset > 0)
    return table[jnp.asarray(buckets)].T


def _buckets(
    distance: Int[np.ndarray, " distances"], num_buckets: int, max_distance: int
) -> Int[np.ndarray, " distances"]:
    """Return the bucket of each distance, in float32 as PyTorch computes it.

    T5's buckets (Raffel et al., arXiv:1910.10683, section 2.1): short distances have one each,
    longer ones share buckets that grow with the logarithm of the distance, and all beyond the
    maximum share the last.
    """
    exact = num_buckets // 2
    far = np.maximum(distance, 1).astype(np.float32) / np.float32(exact)
    log = np.log(far) / np.float32(math.log(max_distance / exact))
    far = exact + (log * np.float32(num_buckets - exact)).astype(np.int64)
    return np.where(distance < exact, distance, np.minimum(far, num_buckets - 1))


# Queries whose logits are in memory at a time: [heads, queries, tokens] in float32.
_QUERIES_A_BLOCK = 128


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EncoderBatch:
    """Whole prompts, one after another, with padding in `tokens`."""

    tokens: Int32[Array, " tokens"]
    # The prompt that each token belongs to; padding has a number of its own.
    prompt: Int32[Array, " tokens"]
    positions: Int32[Array, " tokens"]  # the place of each token in its prompt


@final
class EncoderContext:
    """A `LayerContext` of whole prompts: a token sees all tokens of its own prompt, and no other.

    `biases` are added to the logits by the key's position minus the query's; the middle is 0, and
    offsets beyond them use the first or the last.
    """

    adapter: Int32[Array, " tokens"] | None = None
    layer_input: Float[Array, "tokens width"] | None = None

    def __init__(self, batch: EncoderBatch, biases: Float[Array, "heads offsets"]):
        self._batch = batch
        self._biases = biases.astype(jnp.float32)

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
        if qkv.shape[2] != 3 or any(x is not None for x in (soft_cap, alibi_slopes, sinks)):
            raise NotImplementedError("encoders with grouped queries, a soft cap, ALiBi or sinks")
        tokens, heads, _, head_dim = qkv.shape
        q, k, v = (qkv[:, :, column] for column in range(3))
        factor = head_dim**-0.5 if scale is None else scale
        size = min(tokens, _QUERIES_A_BLOCK)
        count = -(-tokens // size)

        def in_blocks(x: jax.Array) -> jax.Array:
            x = jnp.pad(x, ((0, count * size - tokens), *((0, 0),) * (x.ndim - 1)))
            return x.reshape(count, size, *x.shape[1:])

        batch = self._batch
        out = lax.map(
            lambda block: self._block(block[0], block[1], block[2], k, v, factor),
            tuple(map(in_blocks, (q, batch.prompt, batch.positions))),
        )
        return out.reshape(count * size, heads, head_dim)[:tokens]

    def rotated(
        self, x: Float[Array, "tokens kv_heads columns head_dim"]
    ) -> Float[Array, "tokens kv_heads columns head_dim"]:
        return x

    def attend_shared(
        self, q: Float[Array, "tokens kv_heads columns head_dim"], *, scale: float | None
    ) -> Float[Array, "tokens q_heads head_dim"]:
        raise NotImplementedError("encoders whose layers share keys and values")

    def recur(self, advance: Advance, arrays: Arrays, inputs: Inputs) -> Float[Array, "tokens ..."]:
        raise NotImplementedError("encoders with recurrent layers")

    def cross(self) -> CrossContext:
        raise NotImplementedError("encoders with cross attention")

    def _block(
        self,
        q: Float[Array, "queries heads head_dim"],
        prompt: Int32[Array, " queries"],
        positions: Int32[Array, " queries"],
        k: Float[Array, "tokens heads head_dim"],
        v: Float[Array, "tokens heads head_dim"],
        scale: float,
    ) -> Float[Array, "queries heads head_dim"]:
        middle = self._biases.shape[1] // 2
        offset = jnp.clip(self._batch.positions - positions[:, None], -middle, middle)
        logits = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32) * scale
        logits += self._biases[:, offset + middle]
        # A query of the last block's padding sees the first prompt, and is dropped.
        logits = jnp.where(self._batch.prompt == prompt[:, None], logits, -jnp.inf)
        weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
        return jnp.einsum("hqk,khd->qhd", weights, v)


@final
class Encoder(nnx.Module):
    """Bidirectional layers and a norm over embedded prompts.

    blocks          one `Block` for each layer, or one block with the parameters of all layers
    norm            of the last hidden state
    relative_bias   [buckets, heads]   of all layers
    """

    def __init__(
        self,
        config: DecoderConfig,  # of the encoder: its `num_layers` are those of the encoder
        block_class: type[Block],  # the class of its layers
        *,
        num_buckets: int,
        max_distance: int,  # distances from this one on share a bucket
        rngs: nnx.Rngs | None,
        layer_layout: LayerLayout,
    ):
        self.config = config
        self.max_distance = max_distance
        new = ParamMaker(rngs, config.dtype)
        if layer_layout == "scanned":
            stacked = ParamMaker(rngs, config.dtype, config.num_layers)
            self.blocks = block_class(config, stacked)
        else:
            self.blocks = nnx.List([block_class(config, new) for _ in range(config.num_layers)])
        self.norm = block_class.new_norm(config, new)
        shape = (num_buckets, config.num_heads)
        self.relative_bias = new.table((None, "kv_heads"), shape)

    def __call__(
        self, x: Float[Array, "tokens embed"], batch: EncoderBatch
    ) -> Float[Array, "tokens embed"]:
        """Return the hidden states after the last norm of embedded tokens `x`."""
        biases = both_ways_biases(self.relative_bias[...], self.max_distance)
        if isinstance(self.blocks, nnx.List):
            for block in self.blocks:
                x = _one_layer(*nnx.split(block), x, batch, biases)
        else:
            graphdef, stacked = nnx.split(self.blocks)
            context = EncoderContext(batch, biases)
            x, _ = lax.scan(
                lambda x, state: (nnx.merge(graphdef, state)(x, context), None), x, stacked
            )
        return self.norm(x)


@partial(jax.jit, static_argnums=0)
def _one_layer(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    x: Float[Array, "tokens embed"],
    batch: EncoderBatch,
    biases: Float[Array, "heads offsets"],
) -> Float[Array, "tokens embed"]:
    """Run one unrolled layer; jitted so that equal layers share a trace."""
    return nnx.merge(graphdef, state)(x, EncoderContext(batch, biases))


class RelativeConfig(Protocol):
    """The fields of a configuration about the encoder and relative positions."""

    num_buckets: int
    max_distance: int

    @property
    def encoder(self) -> DecoderConfig:
        """The configuration of the encoder's layers."""
        ...


class CrossBlock(Block):
    """A `Block` with cross attention between attention and MLP, over a norm of its own."""

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        super().__init__(config, new)
        self.cross_norm = self.new_norm(config, new)
        self.cross = CrossAttention(config, new)

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        x = added(x, self.attention(self.attention_norm(x), context))
        x = added(x, self.cross(self.cross_norm(x), context.cross()))
        return added(x, self.mlp(self.mlp_norm(x), context))


def added(
    x: Float[Array, "tokens embed"], update: Float[Array, "tokens embed"]
) -> Float[Array, "tokens embed"]:
    """Return the sum of the residual stream, which may have a wider dtype, and its update."""
    return x + update.astype(x.dtype)


class EncoderDecoder(Decoder):
    """A `Decoder` of `CrossBlock`s, with an encoder in the part that has the start.

    encoder         see `Encoder`; it shares the embedding
    relative_bias   [buckets, heads]   of the self-attention of all decoder layers

    A batch's tokens are the decoder's; `encode` and `write_encoded` come before them.
    """

    block_class: ClassVar[type[CrossBlock]]
    encoder_block_class: ClassVar[type[Block]]

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs | None,
        layer_layout: LayerLayout = "unrolled",
        part: Part | None = None,
    ):
        super().__init__(config, rngs=rngs, layer_layout=layer_layout, part=part)
        relative = cast(RelativeConfig, config)
        self._max_distance = relative.max_distance
        new = ParamMaker(rngs, config.dtype)
        self.relative_bias = new.table((None, "kv_heads"), (relative.num_buckets, config.num_heads))
        if self.has_start:
            self.encoder = Encoder(
                relative.encoder,
                self.encoder_block_class,
                num_buckets=relative.num_buckets,
                max_distance=relative.max_distance,
                rngs=rngs,
                layer_layout=layer_layout,
            )

    def encode(self, batch: EncoderBatch) -> Float[Array, "tokens embed"]:
        return self.encoder(self._embed(batch.tokens, batch.positions, None), batch)

    def write_encoded(
        self, encoded: Float[Array, "tokens embed"], batch: AttentionBatch, cache: KVCache
    ) -> KVCache:
        """Return the cache with each layer's KV of the encoder's output for the batch."""
        if isinstance(self.blocks, nnx.List):
            for layer, block in enumerate(self.blocks):
                assert isinstance(block, CrossBlock)
                own = _one_write(*nnx.split(block.cross), encoded, batch, cache.buffer(layer))
                cache = cache.with_buffer(layer, own)
            return cache
        graphdef, stacked = nnx.split(cast(CrossBlock, self.blocks).cross)

        def one_layer(cache, layer_and_state):
            layer, state = layer_and_state
            context = CrossContext(layer, batch, cache)
            nnx.merge(graphdef, state).write(encoded, context)
            return context.cache, None

        layers = jnp.arange(self.config.num_layers)
        return lax.scan(one_layer, cache, (layers, stacked))[0]

    def tapped(
        self,
        inputs: Int32[Array, " tokens"] | Float[Array, "tokens embed"],
        batch: AttentionBatch,
        cache: KVCache,
        tap: Tap | None,
        incoming: IncomingPages | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], KVCache, Float[Array, "rows embed"] | None]:
        biases = causal_biases(self.relative_bias[...], self._max_distance)
        batch = replace(batch, distance_bias=biases.astype(jnp.float32))
        return super().tapped(inputs, batch, cache, tap, incoming)

    def whole_logits(
        self, tokens: Int32[Array, "sequences length"]
    ) -> Float32[Array, "sequences length vocab"]:
        """Raise UnsupportedModelError: one sequence cannot be split into prompt and answer."""
        raise _no_whole_sequences()

    def whole_residual(
        self, tokens: Int32[Array, "sequences length"], num_layers: int
    ) -> Float[Array, "sequences length embed"]:
        """Raise UnsupportedModelError, as `whole_logits`."""
        raise _no_whole_sequences()


def _no_whole_sequences() -> UnsupportedModelError:
    return UnsupportedModelError(
        "an encoder-decoder model cannot score or train on whole sequences here; serve it, or "
        "train it elsewhere and load the checkpoint"
    )


@partial(jax.jit, static_argnums=0)
def _one_write(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    encoded: Float[Array, "tokens embed"],
    batch: AttentionBatch,
    cache: KVCache,
) -> KVCache:
    """Write one unrolled layer's keys and values into its own cache buffer."""
    context = CrossContext(0, batch, cache)
    nnx.merge(graphdef, state).write(encoded, context)
    return context.cache
