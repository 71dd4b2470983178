"""OPT: learned positions, ReLU, biases; in the 350M model norms follow the sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxtyping import Array, Float, Int32

from jaxserve.models.config import DecoderConfig, Fields, check_is, plain_sizes
from jaxserve.models.context import LayerContext
from jaxserve.models.decoder import Decoder
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, TwoLayerMLP, activation_of
from jaxserve.models.linear import Linear
from jaxserve.models.norms import LayerNorm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.weights import Weight, layer_norm, split_qkv

_FIRST_POSITION = 2  # checkpoints have two rows before it, for padding
_FIELDS = {
    "opt": Fields(
        dict(
            vocab_size=50272,
            hidden_size=768,
            num_hidden_layers=12,
            ffn_dim=3072,
            max_position_embeddings=2048,
            do_layer_norm_before=True,
            _remove_final_layer_norm=False,
            word_embed_proj_dim=None,
            num_attention_heads=12,
            activation_function="relu",
            enable_bias=True,
            layer_norm_elementwise_affine=True,
            tie_word_embeddings=True,
        )
    )
}


@final
@dataclass(frozen=True, kw_only=True)
class OPTConfig(DecoderConfig):
    """Zhang et al., arXiv:2205.01068."""

    activation: str = "relu"
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    qkv_bias: bool = True
    o_bias: bool = True
    mlp_bias: bool = True
    # Whether norms come before attention and MLP, and one after the last layer; true except in the
    # 350M model.
    norm_first: bool = True
    # The width of token embeddings, which are projected if it is not hidden_size (350M).
    embedding_size: int

    @property
    def projects(self) -> bool:
        """Whether token embeddings and layers have different widths."""
        return self.embedding_size != self.hidden_size

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS["opt"].read(given)
        sizes = plain_sizes(given, mlp="ffn_dim")
        check_is(given, "enable_bias", (True,))
        check_is(given, "layer_norm_elementwise_affine", (True,))
        check_is(given, "_remove_final_layer_norm", (False,))
        return cls(
            **sizes,
            activation=activation_of(given, "activation_function"),
            tie_word_embeddings=bool(given["tie_word_embeddings"]),
            norm_first=bool(given["do_layer_norm_before"]),
            embedding_size=given["word_embed_proj_dim"] or sizes["hidden_size"],
        )


@final
class OPTBlock(Block):
    """A `Block` whose norms follow the sums if `norm_first` is false."""

    norm_class = LayerNorm
    mlp_class = TwoLayerMLP

    def __init__(self, config: OPTConfig, new: ParamMaker):
        super().__init__(config, new)
        self.norm_first = config.norm_first

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        if self.norm_first:
            return super().__call__(x, context)
        x = self.attention_norm(x + self.attention(x, context))
        return self.mlp_norm(x + self.mlp(x, context))


@final
class OPT(Decoder):
    """The `Decoder` of OPT.

    embedding    [vocab, embedding_size], as lm_head [embedding_size, vocab]
    positions    [max_position_embeddings + 2, embed]
    project_in   [embedding_size, embed], project_out [embed, embedding_size]   if they differ
    norm         if `norm_first` is true
    """

    block_class = OPTBlock
    config: OPTConfig  # pyrefly: ignore[bad-override-mutable-attribute]

    def _add_embedding(self, new: ParamMaker) -> None:
        vocab, size = self.config.vocab_size, self.config.embedding_size
        self.embedding = new.weight(("vocab", "embed"), (vocab, size), transposed=True)

    def _add_start(self, new: ParamMaker) -> None:
        config = self.config
        embed, size = config.hidden_size, config.embedding_size
        rows = config.max_position_embeddings + _FIRST_POSITION
        self.positions = new.table((None, "embed"), (rows, embed))
        if config.projects:
            self.project_in = new.weight((None, "embed"), (size, embed))

    def _add_end(self, new: ParamMaker) -> None:
        config = self.config
        vocab, embed, size = config.vocab_size, config.hidden_size, config.embedding_size
        if config.projects:
            self.project_out = new.weight(("embed", None), (embed, size))
        if config.norm_first:
            self.norm = LayerNorm(config, new)
        if not config.tie_word_embeddings:
            self.lm_head = new.weight(("embed", "vocab"), (size, vocab))

    def _embed(
        self,
        tokens: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, "tokens embed"]:
        x = self._embedded(tokens, adapter)
        if self.config.projects:
            x = Linear(self.project_in, row_kernels=self.row_kernels)(x, adapter)
        return x + self.positions[...][positions + _FIRST_POSITION]

    def _end(
        self, x: Float[Array, "tokens embed"], adapter: Int32[Array, " tokens"] | None
    ) -> Float[Array, "tokens hidden"]:
        x = self.norm(x) if self.config.norm_first else x
        if not self.config.projects:
            return x
        return Linear(self.project_out, row_kernels=self.row_kernels)(x, adapter)


def _weights(config: OPTConfig) -> dict[str, Weight]:
    model = "model.decoder."
    layer = model + "layers.{layer}."
    attention = layer + "self_attn."
    return {
        "embedding": Weight.of(model + "embed_tokens.weight", "v e"),
        "positions": Weight.of(model + "embed_positions.weight", "p e"),
        "project_in": Weight.of(model + "project_in.weight", "s e", "e s"),
        "project_out": Weight.of(model + "project_out.weight", "e s", "s e"),
        "lm_head": Weight.of("lm_head.weight", "e v", "v e"),
        "blocks.attention.wqkv": split_qkv(attention, "weight", config.group),
        "blocks.attention.bqkv": split_qkv(attention, "bias", config.group),
        "blocks.attention.wo": Weight.of(attention + "out_proj.weight", "k g d e", "e (k g d)"),
        "blocks.attention.bo": Weight.of(attention + "out_proj.bias"),
        "blocks.mlp.up": Weight.of(layer + "fc1.weight", "e m", "m e"),
        "blocks.mlp.bup": Weight.of(layer + "fc1.bias", "m"),
        "blocks.mlp.down": Weight.of(layer + "fc2.weight", "m e", "e m"),
        "blocks.mlp.bdown": Weight.of(layer + "fc2.bias"),
        **layer_norm("norm", model + "final_layer_norm"),
        **layer_norm("blocks.attention_norm", layer + "self_attn_layer_norm"),
        **layer_norm("blocks.mlp_norm", layer + "final_layer_norm"),
    }


FAMILY = Family(fields=_FIELDS, config=OPTConfig, decoder=OPT, weights=_weights)
