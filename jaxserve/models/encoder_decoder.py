"""The decoder of an encoder-decoder model, which attends to itself and to an encoder's output.

A sequence's positions are those of the encoder's prompt, then padding to the end of a page, then
those of the decoder. The pages of prompt positions hold, for each decoder layer, the keys and
values of cross attention to the encoder's output there. The pages behind them hold the decoder's
own keys and values. So both lie in one page table, and the decoder's positions begin with a page.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar, Protocol, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.attention import CrossAttention
from jaxserve.models.batch import AttentionBatch, KVCache
from jaxserve.models.config import DecoderConfig
from jaxserve.models.context import CrossContext, LayerContext
from jaxserve.models.decoder import Decoder, LayerLayout, Part, Tap
from jaxserve.models.encoder import Encoder, EncoderBatch
from jaxserve.models.incoming import IncomingPages
from jaxserve.models.layers import Block
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.relative_positions import causal_biases


class RelativeConfig(Protocol):
    """What a configuration says of the encoder and of relative positions."""

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
        self.cross_norm = self.norm_class(config, new)
        self.cross = CrossAttention(config, new)

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        """See `Block`."""
        x = added(x, self.attention(self.attention_norm(x), context))
        x = added(x, self.cross(self.cross_norm(x), context.cross()))
        return added(x, self.mlp(self.mlp_norm(x), context))


def added(
    x: Float[Array, "tokens embed"], update: Float[Array, "tokens embed"]
) -> Float[Array, "tokens embed"]:
    """Return the residual stream, which may be wider than its update, with the update."""
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
        """Return the encoder's output for whole prompts."""
        return self.encoder(self._embed(batch.tokens, batch.positions, None), batch)

    def write_encoded(
        self, encoded: Float[Array, "tokens embed"], batch: AttentionBatch, cache: KVCache
    ) -> KVCache:
        """Return the cache with each layer's keys and values of the encoder's output.

        Args:
          batch: says where each token is written.
        """
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
        """See `Decoder`."""
        biases = causal_biases(self.relative_bias[...], self._max_distance)
        batch = replace(batch, distance_bias=biases.astype(jnp.float32))
        return super().tapped(inputs, batch, cache, tap, incoming)

    def whole_logits(
        self, tokens: Int32[Array, "sequences length"]
    ) -> Float32[Array, "sequences length vocab"]:
        """Raise UnsupportedModelError: one sequence has no prompt and answer to tell apart."""
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
