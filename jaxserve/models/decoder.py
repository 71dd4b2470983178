"""The decoder that every family builds on: embedding, layers over the cache, norm, logits.

embedding     [vocab, embed]
blocks        one `Block` for each layer, or one block with the parameters of all layers stacked
norm          of the last hidden state
lm_head       [embed, vocab]     absent if it is tied to the embedding
lm_head_bias  [vocab]            if the config has it
score         [hidden, labels]   if the model has a head for labels

A decoder can be a part of a model, for a stage of a stage plan: some of the layers, with the
embedding in the first part and the norm and the logits in the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self, final

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.kernels import RopeTables, log_sum_exp
from jaxserve.kernels.dispatch import only_rows
from jaxserve.models.batch import AttentionBatch, IncomingPages, KVCache
from jaxserve.models.config import DecoderConfig
from jaxserve.models.context import PagedContext, WholeContext
from jaxserve.models.experts import MixtureOfExperts
from jaxserve.models.layer_inputs import LayerInputs
from jaxserve.models.layers import Block, RecurrentBlock, scaled, soft_capped
from jaxserve.models.linear import Linear, SumsRows
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.pooling import Labels
from jaxserve.models.recurrence import Inputs, Mixer
from jaxserve.models.rope import Rope, rope_tables

LayerLayout = Literal["unrolled", "scanned"]


@final
@dataclass(frozen=True)
class Part:
    """The layers of a decoder's part of a model, and whether it has the start and the end."""

    layers: range
    has_start: bool
    has_end: bool


@final
@dataclass(frozen=True)
class Tap:
    """A place where the residual stream is read."""

    layer: int  # the number of layers before that place
    rows: Int32[Array, " rows"]  # the tokens to read


class Decoder(SumsRows):
    """A decoder over a flat ragged batch and a cache; families set classes of blocks of their own.

    Args:
      rngs: for random weights; None for zeros if only shapes matter, as under `nnx.eval_shape`.
      layer_layout: `unrolled` has a block and a cache buffer for each layer; `scanned` stacks both
        ([layers, ...]) and loops with `lax.scan`.

    Raises:
      UnsupportedModelError: scanned layers that differ in their kinds, windows or rotary
        embeddings.
    """

    block_class: ClassVar[type[Block]] = Block
    recurrent_block_class: ClassVar[type[Block]] = RecurrentBlock
    layer_inputs: LayerInputs | None = None  # `_add_start` makes them

    def __init__(
        self,
        config: DecoderConfig,  # also sets the dtype of the parameters and activations
        *,
        rngs: nnx.Rngs | None,
        layer_layout: LayerLayout = "unrolled",
        part: Part | None = None,  # None for the whole model
    ):
        part = part or Part(range(config.num_layers), has_start=True, has_end=True)
        config = config.part(part.layers)
        self.config = config
        self.layer_layout: LayerLayout = layer_layout
        self.has_start, self.has_end = part.has_start, part.has_end
        ends = ParamMaker(rngs, config.dtype)
        if self.has_start or config.tie_word_embeddings and self.has_end:
            self._add_embedding(ends)
        if self.has_start:
            self._add_start(ends)
        if self.has_end:
            self._add_end(ends)
        if self.has_end and config.labels is not None and not config.labels.token_ids:
            shape = (config.output_size, len(config.labels.names))
            self.score = ends.weight(("embed", None), shape, stays_dense=True)
        if layer_layout == "unrolled":
            new = ParamMaker(rngs, config.dtype)
            layers = range(config.num_layers)
            self.blocks = nnx.List([self._new_block(layer, new) for layer in layers])
        elif layer_layout == "scanned":
            if not config.is_uniform:
                raise UnsupportedModelError(
                    "layers with differing kinds, sliding windows or rotary embeddings cannot be "
                    "scanned; use layer_layout='unrolled'"
                )
            new = ParamMaker(rngs, config.dtype, config.num_layers)
            self.blocks = self._new_block(0, new)
        else:
            raise ValueError(
                f"layer_layout={layer_layout!r} is unknown; give 'unrolled' or 'scanned'"
            )

    def __call__(
        self,
        inputs: Int32[Array, " tokens"] | Float[Array, "tokens embed"],
        batch: AttentionBatch,
        cache: KVCache,
    ) -> tuple[Float[Array, "tokens hidden"], KVCache]:
        """Return the hidden states after the last norm, and the cache with this step's KV.

        `inputs` are tokens. A part without the start takes the residual stream instead; a part
        without the end returns it.
        """
        hidden, cache, _ = self.tapped(inputs, batch, cache, None)
        return hidden, cache

    def tapped(
        self,
        inputs: Int32[Array, " tokens"] | Float[Array, "tokens embed"],
        batch: AttentionBatch,
        cache: KVCache,
        tap: Tap | None,
        incoming: IncomingPages | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], KVCache, Float[Array, "rows embed"] | None]:
        """Return the same, and the residual stream at `tap`; None without a tap.

        `incoming` pages are put into the cache before it is read.
        """
        tables = self._rope_tables(batch.positions)
        x = self._embed(inputs, batch.positions, batch.adapter) if self.has_start else inputs
        if self.layer_layout == "unrolled":
            layer_tables = [tables[rope] for rope in self.config.layer_ropes]
            own = self._layer_inputs(inputs, x, batch.adapter)
            x, cache, tapped = self._unroll(x, own, layer_tables, batch, cache, tap, incoming)
        else:
            table = tables[self.config.layer_ropes[0]]
            x, cache, tapped = self._scan(x, table, batch, cache, tap, incoming)
        return (self._end(x, batch.adapter) if self.has_end else x), cache, tapped

    def with_states(self, batch: AttentionBatch, cache: KVCache) -> KVCache:
        """Return the cache with the states after the tokens that count of a batch `is_proposed`.

        `batch` is that batch, with rows of only these tokens. Recurrent layers advance again, from
        the states before it and the inputs in the cache. So a state is read twice and written once
        for the batch, and no copy of it is kept: of a token, each layer keeps the inputs of its
        recurrence (in a Bamba of 9B 17 KB in bfloat16, where a copy of the state is 4 MB).
        """
        inputs, cache = iter(cache.inputs), replace(cache, inputs=())
        batch = replace(batch, is_proposed=False)
        if not isinstance(self.blocks, nnx.List):
            graphdef, stacked = nnx.split(self.blocks.mixer)

            def one_layer(cache: KVCache, each: Any) -> tuple[KVCache, None]:
                layer, state, inputs = each
                return _advanced(graphdef, layer, state, inputs, batch, cache), None

            layers = jnp.arange(self.config.num_layers)
            return lax.scan(one_layer, cache, (layers, stacked, tuple(inputs)))[0]
        each = zip(self.blocks, self.config.layer_kinds, self.config.places, strict=True)
        for block, kind, place in each:
            if kind in ("recurrent", "both"):
                graphdef, state = nnx.split(block.mixer)
                own = tuple(next(inputs) for _ in block.mixer.advances)
                part = cache.layer(kind, place)
                part = _advanced(graphdef, 0, state, own, batch, part)
                cache = cache.with_layer(kind, place, part)
        return cache

    def for_context(self, max_context: int) -> Self:
        """Return the model for sequences of at most `max_context` tokens; it shares the parameters.

        It is the same model, unless its rotary embedding depends on that.
        """
        config = self.config.for_context(max_context)
        if config == self.config:
            return self
        fitted = nnx.merge(*nnx.split(self))
        fitted.config = config
        return fitted

    def whole_logits(
        self, tokens: Int32[Array, "sequences length"]
    ) -> Float32[Array, "sequences length vocab"]:
        """Return the logits of whole sequences.

        Padding at the end of a sequence changes nothing before it. Uses no cache, is
        differentiable, and serves training and scoring. On CPUs where serving is deterministic
        (docs/batch_invariance.md), these are the bits of the logits that tokens are sampled from.
        """
        x = self.whole_residual(tokens, self.config.num_layers)
        hidden = self._end(x.reshape(-1, x.shape[-1]), None)
        return self.logits(hidden).reshape(*tokens.shape, -1)

    def whole_logprobs(
        self, tokens: Int32[Array, "sequences length"]
    ) -> Float32[Array, "sequences length_minus_1"]:
        """Return the log-probability of each token after the first, given those before it.

        It is differentiable. On CPUs where serving is deterministic, these are the bits of the
        log-probabilities that sampling reports.
        """
        logits = self.whole_logits(tokens)[:, :-1]
        rows = logits.reshape(-1, logits.shape[-1])
        chosen = jnp.take_along_axis(rows, tokens[:, 1:].reshape(-1, 1), axis=1)[:, 0]
        return (chosen - log_sum_exp(rows)).reshape(tokens.shape[0], -1)

    def whole_residual(
        self, tokens: Int32[Array, "sequences length"], num_layers: int
    ) -> Float[Array, "sequences length embed"]:
        """Return the residual stream of whole sequences after the first `num_layers` layers."""
        config = self.config
        num_sequences, length = tokens.shape
        positions = jnp.tile(jnp.arange(length), num_sequences)
        tables = self._rope_tables(positions)
        x = self._embed(tokens.reshape(-1), positions, None)
        if isinstance(self.blocks, nnx.List):
            own, contexts = self._layer_inputs(tokens.reshape(-1), x, None), []
            for layer in range(num_layers):
                source = config.kv_sources[layer]
                context = WholeContext(
                    length,
                    tables[config.layer_ropes[layer]],
                    config.sliding_windows[layer],
                    config.attention_chunks[layer],
                    layer_input=own[layer],
                    source=None if source is None else contexts[source],
                )
                contexts.append(context)
                x = self.blocks[layer](x, context)
        else:
            graphdef, stacked = nnx.split(self.blocks)
            window, chunk = config.sliding_windows[0], config.attention_chunks[0]
            context = WholeContext(length, tables[config.layer_ropes[0]], window, chunk)
            x, _ = lax.scan(
                lambda x, state: (nnx.merge(graphdef, state)(x, context), None),
                x,
                jax.tree.map(lambda leaf: leaf[:num_layers], stacked),
            )
        return x.reshape(num_sequences, length, -1)

    def logits(
        self, hidden: Float[Array, "rows hidden"], adapter: Int32[Array, " rows"] | None = None
    ) -> Float32[Array, "rows vocab"]:
        """Return the logits of final hidden states.

        `adapter` is that of each row, -1 for none; None if no row has one.
        """
        tied = self.config.tie_word_embeddings
        weight = self.embedding if tied else self.lm_head
        bias = self.lm_head_bias if self.config.lm_head_bias else None
        linear = Linear(weight, bias, transposed=tied, row_kernels=self.row_kernels)
        logits = linear(hidden, adapter, out_dtype=jnp.float32)
        scale = self.config.logits_scale
        logits = logits if scale is None else logits * scale
        return soft_capped(logits, self.config.logits_soft_cap)

    def labelled(self, labels: Labels) -> Self:
        """Return this model with labels whose logits are those of tokens; it shares all arrays."""
        model = nnx.merge(*nnx.split(self))
        model.config = replace(self.config, labels=labels)
        return model

    def label_logits(self, hidden: Float[Array, "rows hidden"]) -> Float32[Array, "rows labels"]:
        """Return the logits of the model's labels for final hidden states."""
        labels = self.config.labels
        assert labels is not None, "a model without labels"
        if labels.token_ids:
            return self.logits(hidden)[:, jnp.asarray(labels.token_ids)]
        return Linear(self.score)(hidden, None, out_dtype=jnp.float32)

    def _new_block(self, layer: int, new: ParamMaker) -> Block:
        block_class = self._block_class(layer)
        if self.config.mlp_kinds[layer] == "experts" and block_class.mlp_class is None:
            return block_class(self.config, new, mlp_class=MixtureOfExperts)
        return block_class(self.config, new)

    def _block_class(self, layer: int) -> type[Block]:
        """Return the class of a layer's block, by its kind in the config.

        Layers of equal kinds have one class. Parameters of classes that differ in their shapes or
        tensors have different paths in a block, so that each has its entry in the family's table.
        """
        has_attention = self.config.layer_kinds[layer] in ("attention", "both")
        return self.block_class if has_attention else self.recurrent_block_class

    def _add_embedding(self, new: ParamMaker) -> None:
        """Make the embedding, which also gives the logits if it is tied."""
        vocab, embed = self.config.vocab_size, self.config.hidden_size
        self.embedding = new.weight(("vocab", "embed"), (vocab, embed), transposed=True)

    def _add_start(self, new: ParamMaker) -> None:
        """Make the other parameters before the layers."""

    def _add_end(self, new: ParamMaker) -> None:
        config = self.config
        vocab, embed = config.vocab_size, config.hidden_size
        self.norm = self.block_class.new_norm(config, new)
        if not config.tie_word_embeddings:
            self.lm_head = new.weight(("embed", "vocab"), (embed, vocab))
        if config.lm_head_bias:
            self.lm_head_bias = new.zeros(("vocab",), (vocab,))

    def _embed(
        self,
        tokens: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, "tokens embed"]:
        return scaled(self._embedded(tokens, adapter), self.config.embedding_scale)

    def _embedded(
        self, tokens: Int32[Array, " tokens"], adapter: Int32[Array, " tokens"] | None
    ) -> Float[Array, "tokens hidden"]:
        return Linear(self.embedding).rows(tokens, adapter, self.config.dtype)

    def _layer_inputs(
        self,
        tokens: Int32[Array, " tokens"] | Float[Array, "tokens embed"],
        x: Float[Array, "tokens embed"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Sequence[Float[Array, "tokens width"] | None]:
        """Return the tokens' own input of each layer, beside the residual stream at the start."""
        if self.layer_inputs is None:
            return (None,) * self.config.num_layers
        return self.layer_inputs(tokens, x, adapter)

    def _end(
        self, x: Float[Array, "tokens embed"], adapter: Int32[Array, " tokens"] | None
    ) -> Float[Array, "tokens hidden"]:
        """Return the input of `logits` for the residual stream after the last layer."""
        return self.norm(x)

    def _rope_tables(
        self, positions: Int32[Array, " tokens"]
    ) -> dict[Rope | None, RopeTables | None]:
        """Return the tables of every rotary embedding of the layers."""
        return {
            rope: None if rope is None else rope_tables(positions, self.config.head_dim, rope)
            for rope in dict.fromkeys(self.config.layer_ropes)
        }

    def _unroll(
        self,
        x: Float[Array, "tokens embed"],
        layer_inputs: Sequence[Float[Array, "tokens width"] | None],
        tables: list[Any],  # of each layer `RopeTables` of its own width, or None
        batch: AttentionBatch,
        cache: KVCache,
        tap: Tap | None,
        incoming: IncomingPages | None,
    ) -> tuple[Float[Array, "tokens embed"], KVCache, Float[Array, "rows embed"] | None]:
        assert isinstance(self.blocks, nnx.List)
        tapped, batches = None, batch.by_table()
        for layer, block in enumerate(self.blocks):
            graphdef, state = nnx.split(block)
            window = self.config.sliding_windows[layer]
            kind, place = self.config.layer_kinds[layer], self.config.places[layer]
            table, place = batch.places[place] if batch.places else (0, place)
            own = cache.layer(kind, place)
            has_own = self.config.kv_sources[layer] is None
            if incoming is not None and kind == "attention" and has_own:
                own = incoming.put(own, 0, incoming.fetch(place))
            chunk, given = self.config.attention_chunks[layer], layer_inputs[layer]
            rows = batches[table]
            x, own = _one_layer(graphdef, window, chunk, state, x, given, tables[layer], rows, own)
            cache = cache.with_layer(kind, place, own)
            if tap is not None and tap.layer == layer + 1:
                tapped = x[tap.rows]
        return x, cache, tapped

    def _scan(
        self,
        x: Float[Array, "tokens embed"],
        tables: RopeTables | None,
        batch: AttentionBatch,
        cache: KVCache,
        tap: Tap | None,
        incoming: IncomingPages | None,
    ) -> tuple[Float[Array, "tokens embed"], KVCache, Float[Array, "rows embed"] | None]:
        graphdef, stacked = nnx.split(self.blocks)
        window, chunk = self.config.sliding_windows[0], self.config.attention_chunks[0]

        def one_layer(carry, layer_and_state):
            layer, state = layer_and_state
            hidden, cache, tapped, fetched = carry
            if incoming is not None:
                cache = incoming.put(cache, layer, fetched)
                fetched = incoming.fetch(layer + 1)  # while this layer is computed
            context = PagedContext(layer, tables, window, batch, cache, chunk)
            with only_rows(batch.valid):
                hidden = nnx.merge(graphdef, state)(hidden, context)
            if tap is not None:
                tapped = jnp.where(layer + 1 == tap.layer, hidden[tap.rows], tapped)
            cache, inputs = replace(context.cache, inputs=()), context.cache.inputs
            return (hidden, cache, tapped, fetched), inputs

        layers = jnp.arange(self.config.num_layers)
        tapped = None if tap is None else x[tap.rows]
        fetched = None if incoming is None else incoming.fetch(0)
        start = x, cache, tapped, fetched
        (x, cache, tapped, _), inputs = lax.scan(one_layer, start, (layers, stacked))
        return x, replace(cache, inputs=inputs), tapped


@partial(jax.jit, static_argnums=(0, 1, 2))
def _one_layer(
    graphdef: nnx.GraphDef,
    window: int | None,
    chunk: int | None,
    state: nnx.State,
    x: Float[Array, "tokens embed"],
    layer_input: Float[Array, "tokens width"] | None,
    tables: RopeTables | None,
    batch: AttentionBatch,
    cache: KVCache,
) -> tuple[Float[Array, "tokens embed"], KVCache]:
    """Run one unrolled layer over its own cache buffer; jitted: equal layers share a trace."""
    context = PagedContext(0, tables, window, batch, cache, chunk, layer_input)
    with only_rows(batch.valid):
        return nnx.merge(graphdef, state)(x, context), context.cache


@partial(jax.jit, static_argnums=0)
def _advanced(
    graphdef: nnx.GraphDef,  # of a mixer
    layer: int | Int32[Array, ""],
    state: nnx.State,
    inputs: tuple[Inputs, ...],
    batch: AttentionBatch,
    cache: KVCache,
) -> KVCache:
    """Return the cache of a recurrent layer that has advanced by the inputs of its mixer."""
    mixer: Mixer = nnx.merge(graphdef, state)
    for (advance, arrays), own in zip(mixer.advances, inputs, strict=True):
        _, cache = cache.recur(layer, advance, own, batch, arrays)
    return cache
