"""OPT, BioGPT and XGLM: positions are added; in OPT 350M norms follow the sums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.models.config import DecoderConfig, Fields, NormKind, check_is, plain_sizes
from jaxserve.models.context import LayerContext
from jaxserve.models.decoder import Decoder
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, activation_of, scaled
from jaxserve.models.linear import Linear
from jaxserve.models.norms import LayerNorm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.weights import Weight, layer_norm, split_qkv, two_layer_mlp

_FIRST_POSITION = 2  # checkpoints have two rows before it, for padding
_FIELDS = {
    "opt": Fields.of(
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
        pad_token_id=1,
    ),
    "biogpt": Fields.of(
        vocab_size=42384,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        hidden_act="gelu",
        max_position_embeddings=1024,
        scale_embedding=True,
        tie_word_embeddings=True,
        pad_token_id=1,
    ),
    "xglm": Fields.of(
        vocab_size=256008,
        max_position_embeddings=2048,
        d_model=1024,
        ffn_dim=4096,
        num_layers=24,
        attention_heads=16,
        activation_function="gelu",
        scale_embedding=True,
        add_cross_attention=False,
        tie_word_embeddings=True,
        aliases={
            "num_attention_heads": "attention_heads",
            "hidden_size": "d_model",
            "num_hidden_layers": "num_layers",
        },
    ),
}
# By `model_type`: what begins the names of tensors, the last norm's name, and the head's.
_NAMES = {
    "opt": ("model.decoder.", "final_layer_norm", "lm_head"),
    "biogpt": ("biogpt.", "layer_norm", "output_projection"),
    "xglm": ("model.", "layer_norm", "lm_head"),
}


@final
@dataclass(frozen=True, kw_only=True)
class OPTConfig(DecoderConfig):
    """Zhang et al., arXiv:2205.01068."""

    activation: str = "relu"
    is_gated: bool = False
    norm_kind: NormKind = "layer"
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
    learns_positions: bool = True  # else they are sines and cosines
    names: tuple[str, str, str] = _NAMES["opt"]

    @property
    def output_size(self) -> int:
        return self.embedding_size

    @property
    def projects(self) -> bool:
        """Whether token embeddings and layers have different widths."""
        return self.embedding_size != self.hidden_size

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        kind = given["model_type"]
        given = _FIELDS[kind].read(given)
        if kind != "opt":
            return cls(**_scaled(given))
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


def _scaled(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of BioGPT (arXiv:2210.10341) or XGLM (arXiv:2112.10668)."""
    is_xglm = given["model_type"] == "xglm"
    if is_xglm:
        check_is(given, "add_cross_attention", (False,))
        names = dict(embed="d_model", layers="num_layers", heads="attention_heads", mlp="ffn_dim")
        sizes = plain_sizes(given, **names)
    else:
        sizes = plain_sizes(given)
    return dict(
        **sizes,
        activation=activation_of(given, "activation_function" if is_xglm else "hidden_act"),
        tie_word_embeddings=bool(given["tie_word_embeddings"]),
        embedding_size=sizes["hidden_size"],
        embedding_scale=sizes["hidden_size"] ** 0.5 if given["scale_embedding"] else 1.0,
        learns_positions=not is_xglm,
        names=_NAMES[given["model_type"]],
    )


@final
class OPTBlock(Block):
    """A `Block` whose norms follow the sums if `norm_first` is false."""

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
    """The `Decoder` of OPT and its relatives.

    embedding    [vocab, embedding_size], as lm_head [embedding_size, vocab]
    positions    [max_position_embeddings + 2, embed]   if `learns_positions` is true
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
        if config.learns_positions:
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
        x = scaled(self._embedded(tokens, adapter), self.config.embedding_scale)
        if self.config.projects:
            x = Linear(self.project_in, row_kernels=self.row_kernels)(x, adapter)
        positions = positions + _FIRST_POSITION
        if self.config.learns_positions:
            return x + self.positions[...][positions]
        return x + _waves(positions, x.shape[-1]).astype(x.dtype)

    def _end(
        self, x: Float[Array, "tokens embed"], adapter: Int32[Array, " tokens"] | None
    ) -> Float[Array, "tokens hidden"]:
        x = self.norm(x) if self.config.norm_first else x
        if not self.config.projects:
            return x
        return Linear(self.project_out, row_kernels=self.row_kernels)(x, adapter)


def _waves(positions: Int32[Array, " tokens"], width: int) -> Float[Array, "tokens embed"]:
    """Return sines and cosines of positions, of frequencies from 1 to 1e-4."""
    half = width // 2
    frequencies = jnp.exp(jnp.arange(half, dtype=jnp.float32) * (-math.log(1e4) / (half - 1)))
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)


def _weights(config: OPTConfig) -> dict[str, Weight]:
    model, norm, head = config.names
    layer = model + "layers.{layer}."
    attention = layer + "self_attn."
    return {
        "embedding": Weight.of(model + "embed_tokens.weight", "v e"),
        "positions": Weight.of(model + "embed_positions.weight", "p e"),
        "project_in": Weight.of(model + "project_in.weight", "s e", "e s"),
        "project_out": Weight.of(model + "project_out.weight", "e s", "s e"),
        "lm_head": Weight.of(f"{head}.weight", "e v", "v e"),
        "blocks.attention.wqkv": split_qkv(attention, "weight", config.group),
        "blocks.attention.bqkv": split_qkv(attention, "bias", config.group),
        "blocks.attention.wo": Weight.of(attention + "out_proj.weight", "k g d e", "e (k g d)"),
        "blocks.attention.bo": Weight.of(attention + "out_proj.bias"),
        **two_layer_mlp("blocks.mlp", layer + "fc1", layer + "fc2"),
        **layer_norm("norm", model + norm),
        **layer_norm("blocks.attention_norm", layer + "self_attn_layer_norm"),
        **layer_norm("blocks.mlp_norm", layer + "final_layer_norm"),
    }


FAMILY = Family(fields=_FIELDS, config=OPTConfig, decoder=OPT, weights=_weights)
