"""Falcon and BLOOM: GPT-NeoX's layers with grouped queries, or with ALiBi."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxtyping import Array, Float, Int32

from jaxserve.models.config import (
    DecoderConfig,
    Fields,
    Residual,
    alibi_slopes,
    check_is,
    plain_sizes,
)
from jaxserve.models.decoder import Decoder
from jaxserve.models.families.gpt_neox import fused_weights
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, TwoLayerMLP, activation_of
from jaxserve.models.norms import LayerNorm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.rope import Rope, rope_fields
from jaxserve.models.weights import Weight, layer_norm

_BLOOM_CONTEXT = 2048  # of its training; ALiBi has no limit, and config.json no field
_FIELDS = {
    "falcon": Fields.of(
        vocab_size=65024,
        hidden_size=4544,
        num_hidden_layers=32,
        num_attention_heads=71,
        num_ln_in_parallel_attn=None,
        layer_norm_epsilon=1e-5,
        num_kv_heads=None,
        alibi=False,
        new_decoder_architecture=False,
        multi_query=True,
        parallel_attn=True,
        bias=False,
        max_position_embeddings=2048,
        rope_parameters=None,
        rope_scaling=None,
        rope_theta=1e4,
        ffn_hidden_size=None,
        activation="gelu",
        tie_word_embeddings=True,
        nullable=("alibi", "new_decoder_architecture", "multi_query", "parallel_attn", "bias"),
        aliases={"n_embed": "hidden_size"},
    ),
    "bloom": Fields.of(
        vocab_size=250880,
        hidden_size=64,
        n_layer=2,
        n_head=8,
        layer_norm_epsilon=1e-5,
        apply_residual_connection_post_layernorm=False,
        tie_word_embeddings=True,
        aliases={
            "n_embed": "hidden_size",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
        },
    ),
}


@final
@dataclass(frozen=True, kw_only=True)
class FalconConfig(DecoderConfig):
    """Almazrouei et al., arXiv:2311.16867; BLOOM (arXiv:2211.05100) normalises embeddings, too."""

    activation: str = "gelu"
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    embedding_norm: bool = False  # whether a norm follows the embedding
    # The names of a layer's norms in checkpoints.
    norm_names: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS[given["model_type"]].read(given)
        return cls(**(_bloom(given) if given["model_type"] == "bloom" else _falcon(given)))


def _bloom(given: Mapping[str, Any]) -> dict[str, Any]:
    check_is(given, "apply_residual_connection_post_layernorm", (False,))
    sizes = plain_sizes(
        {**given, "mlp": None, "positions": _BLOOM_CONTEXT},
        layers="n_layer",
        heads="n_head",
        mlp="mlp",
        positions="positions",
    )
    return dict(
        **sizes,
        activation="gelu_new",
        norm_eps=given["layer_norm_epsilon"],
        tie_word_embeddings=bool(given["tie_word_embeddings"]),
        alibi_slopes=alibi_slopes(sizes["num_heads"]),
        embedding_norm=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )


def _falcon(given: Mapping[str, Any]) -> dict[str, Any]:
    is_new, bias = bool(given["new_decoder_architecture"]), bool(given["bias"])
    sizes = plain_sizes(given, mlp="ffn_hidden_size")
    head_dim, limit = sizes["head_dim"], sizes["max_position_embeddings"]
    if is_new:
        check_is(given, "parallel_attn", (True,))
        check_is(given, "num_ln_in_parallel_attn", (None, 1, 2))
        sizes["num_kv_heads"] = given["num_kv_heads"] or sizes["num_heads"]
    elif given["multi_query"]:
        sizes["num_kv_heads"] = 1
    if not is_new and given["parallel_attn"]:
        check_is(given, "num_ln_in_parallel_attn", (None, 0, 1))
    residual: Residual = "in_turn"
    if given["parallel_attn"]:
        has_two = is_new and given["num_ln_in_parallel_attn"] in (None, 2)
        residual = "parallel" if has_two else "parallel_one_norm"
    rope = None
    if not given["alibi"]:
        rope = Rope.from_hf(rope_fields(given), limit)
        sizes["max_position_embeddings"] = rope.longest_context(limit)
    return dict(
        **sizes,
        activation=activation_of(given, "activation"),
        norm_eps=given["layer_norm_epsilon"],
        tie_word_embeddings=bool(given["tie_word_embeddings"]),
        rope=rope,
        # Its slopes are scaled as the products of queries and keys are.
        alibi_slopes=tuple(slope * head_dim**-0.5 for slope in alibi_slopes(sizes["num_heads"]))
        if given["alibi"]
        else None,
        residual=residual,
        norm_names=("ln_attn", "ln_mlp")
        if residual == "parallel"
        else ("input_layernorm", "post_attention_layernorm"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


@final
class FalconBlock(Block):
    norm_class = LayerNorm
    mlp_class = TwoLayerMLP


@final
class Falcon(Decoder):
    """A `Decoder` with a layer norm `embedding_norm` after the embedding, if the config has it."""

    block_class = FalconBlock
    config: FalconConfig  # pyrefly: ignore[bad-override-mutable-attribute]

    def _add_start(self, new: ParamMaker) -> None:
        if self.config.embedding_norm:
            self.embedding_norm = LayerNorm(self.config, new)

    def _embed(
        self,
        tokens: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, "tokens embed"]:
        x = self._embedded(tokens, adapter)
        return self.embedding_norm(x) if self.config.embedding_norm else x


def _weights(config: FalconConfig) -> dict[str, Weight]:
    layer = "transformer.h.{layer}."
    first, second = config.norm_names
    return {
        **fused_weights(layer, "self_attention."),
        "embedding": Weight.of("transformer.word_embeddings.weight", "v e"),
        "lm_head": Weight.of("lm_head.weight", "e v", "v e"),
        **layer_norm("embedding_norm", "transformer.word_embeddings_layernorm"),
        **layer_norm("norm", "transformer.ln_f"),
        **layer_norm("blocks.attention_norm", layer + first),
        **layer_norm("blocks.mlp_norm", layer + second),
    }


FAMILY = Family(
    fields=_FIELDS,
    config=FalconConfig,
    decoder=Falcon,
    weights=_weights,
    prefix="transformer.",
    ignored=r".*\.rotary_emb\.inv_freq|.*\.maybe_rotary\.inv_freq",
)
