"""The encoder of an encoder-decoder model: whole prompts, several of them in one flat batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import final

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxserve.models.config import DecoderConfig
from jaxserve.models.context import CrossContext
from jaxserve.models.decoder import LayerLayout
from jaxserve.models.layers import Block
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.recurrence import Advance, Inputs, Recurrence
from jaxserve.models.relative_positions import both_ways_biases

# Queries whose logits are in memory at a time: [heads, queries, tokens] in float32.
_QUERIES_A_BLOCK = 128


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EncoderBatch:
    """Whole prompts, one after the other.

    Attributes:
      tokens: of all prompts, and padding.
      prompt: the prompt that each token belongs to; padding has a number of its own.
      positions: the place of each token in its prompt.
    """

    tokens: Int32[Array, " tokens"]
    prompt: Int32[Array, " tokens"]
    positions: Int32[Array, " tokens"]


@final
class EncoderContext:
    """A `LayerContext` of whole prompts: a token sees all tokens of its own prompt, and no other.

    Args:
      biases: added to the logits by the key's position minus the query's; the middle is 0, and
        what is farther away has the first or the last.
    """

    adapter: Int32[Array, " tokens"] | None = None

    def __init__(self, batch: EncoderBatch, biases: Float[Array, "heads offsets"]):
        self._batch = batch
        self._biases = biases.astype(jnp.float32)

    def attend(
        self,
        qkv: Float[Array, "tokens kv_heads columns head_dim"],
        *,
        scale: float | None,
        soft_cap: float | None,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        """See `LayerContext`."""
        if qkv.shape[2] != 3 or soft_cap is not None:
            raise NotImplementedError("encoders with grouped queries or a soft cap")
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

    def recur(
        self, advance: Advance, inputs: Inputs, recurrence: Recurrence, dtype: jax.typing.DTypeLike
    ) -> Float[Array, "tokens ..."]:
        """See `LayerContext`."""
        raise NotImplementedError("encoders with recurrent layers")

    def cross(self) -> CrossContext:
        """See `LayerContext`."""
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

    Args:
      config: of the encoder: its `num_layers` are those of the encoder.
      block_class: what its layers are.
      max_distance: from which on distances share a bucket.
    """

    def __init__(
        self,
        config: DecoderConfig,
        block_class: type[Block],
        *,
        num_buckets: int,
        max_distance: int,
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
        self.norm = block_class.norm_class(config, new)
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
    """One unrolled layer; jitted so that equal layers share a trace."""
    return nnx.merge(graphdef, state)(x, EncoderContext(batch, biases))
