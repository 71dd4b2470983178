"""GPT-NeoX and Pythia: attention and MLP side by side, part of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.models.config import DecoderConfig, Fields, Residual, plain_sizes
from jaxserve.models.decoder import Decoder
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, TwoLayerMLP, activation_of
from jaxserve.models.norms import LayerNorm
from jaxserve.models.rope import Rope, rope_fields
from jaxserve.models.weights import Weight, layer_norm

_FIELDS = {
    "gpt_neox": Fields.of(
        vocab_size=50432,
        hidden_size=6144,
        num_hidden_layers=44,
        num_attention_heads=64,
        intermediate_size=24576,
        hidden_act="gelu",
        max_position_embeddings=2048,
        layer_norm_eps=1e-5,
        tie_word_embeddings=False,
        use_parallel_residual=True,
        rope_parameters=None,
        rope_scaling=None,
        rotary_emb_base=1e4,
        rotary_pct=0.25,
        attention_bias=True,
    )
}


@final
@dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(DecoderConfig):
    """Black et al., arXiv:2204.06745."""

    activation: str = "gelu"
    norm_eps: float = 1e-5
    qkv_bias: bool = True
    o_bias: bool = True
    mlp_bias: bool = True
    rope: Rope | None = Rope()
    residual: Residual = "parallel"

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS["gpt_neox"].read(given)
        sizes = plain_sizes(given)
        rope = rope_fields(given, theta="rotary_emb_base")
        share = rope.get("partial_rotary_factor", given["rotary_pct"])
        bias = bool(given["attention_bias"])
        limit = sizes["max_position_embeddings"]
        turned = Rope.from_hf(rope, limit, dim=int(sizes["head_dim"] * share))
        sizes["max_position_embeddings"] = turned.longest_context(limit)
        return cls(
            **sizes,
            activation=activation_of(given, "hidden_act"),
            norm_eps=given["layer_norm_eps"],
            tie_word_embeddings=bool(given["tie_word_embeddings"]),
            qkv_bias=bias,
            o_bias=bias,
            rope=turned,
            residual="parallel" if given["use_parallel_residual"] else "in_turn",
        )


@final
class GPTNeoXBlock(Block):
    norm_class = LayerNorm
    mlp_class = TwoLayerMLP


@final
class GPTNeoX(Decoder):
    block_class = GPTNeoXBlock


def fused_weights(layer: str, attention: str) -> dict[str, Weight]:
    """Return the weights of layers under GPT-NeoX's names.

    `layer` begins the names of a layer's tensors, and `attention` the rest of its attention's.
    """
    attention, mlp = layer + attention, layer + "mlp."
    return {
        "blocks.attention.wqkv": Weight.of(
            attention + "query_key_value.weight", "e k x d", "(k x d) e"
        ),
        "blocks.attention.bqkv": Weight.of(attention + "query_key_value.bias", "k x d", "(k x d)"),
        "blocks.attention.wo": Weight.of(attention + "dense.weight", "k g d e", "e (k g d)"),
        "blocks.attention.bo": Weight.of(attention + "dense.bias"),
        "blocks.mlp.up": Weight.of(mlp + "dense_h_to_4h.weight", "e m", "m e"),
        "blocks.mlp.bup": Weight.of(mlp + "dense_h_to_4h.bias", "m"),
        "blocks.mlp.down": Weight.of(mlp + "dense_4h_to_h.weight", "m e", "e m"),
        "blocks.mlp.bdown": Weight.of(mlp + "dense_4h_to_h.bias"),
        **layer_norm("blocks.attention_norm", layer + "input_layernorm"),
        **layer_norm("blocks.mlp_norm", layer + "post_attention_layernorm"),
    }


def _weights(config: GPTNeoXConfig) -> dict[str, Weight]:
    return {
        **fused_weights("gpt_neox.layers.{layer}.", "attention."),
        "embedding": Weight.of("gpt_neox.embed_in.weight", "v e"),
        "lm_head": Weight.of("embed_out.weight", "e v", "v e"),
        **layer_norm("norm", "gpt_neox.final_layer_norm"),
    }


FAMILY = Family(
    fields=_FIELDS,
    config=GPTNeoXConfig,
    decoder=GPTNeoX,
    weights=_weights,
    prefix="gpt_neox.",
    ignored=r".*\.attention\.(masked_)?bias|.*\.rotary_emb\.inv_freq",
)
