"""Persimmon: attention and MLP in turn, layer norms of heads, half of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.models.config import DecoderConfig, Fields, plain_sizes
from jaxserve.models.decoder import Decoder
from jaxserve.models.families.gpt_neox import GPTNeoXBlock, fused_weights
from jaxserve.models.family import Family
from jaxserve.models.layers import activation_of
from jaxserve.models.rope import Rope, rope_fields
from jaxserve.models.weights import Weight, layer_norm

_FIELDS = {
    "persimmon": Fields.of(
        vocab_size=262144,
        hidden_size=4096,
        intermediate_size=16384,
        num_hidden_layers=36,
        num_attention_heads=64,
        hidden_act="relu2",
        max_position_embeddings=16384,
        layer_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters=None,
        rope_scaling=None,
        rope_theta=1e4,
        partial_rotary_factor=0.5,
        qk_layernorm=True,
    )
}


@final
@dataclass(frozen=True, kw_only=True)
class PersimmonConfig(DecoderConfig):
    """Adept 2023."""

    activation: str = "relu2"
    norm_eps: float = 1e-5
    qkv_bias: bool = True
    o_bias: bool = True
    mlp_bias: bool = True
    rope: Rope | None = Rope()

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS["persimmon"].read(given)
        sizes, rope = plain_sizes(given), rope_fields(given)
        share = rope.get("partial_rotary_factor", given["partial_rotary_factor"])
        limit = sizes["max_position_embeddings"]
        turned = Rope.from_hf(rope, limit, dim=int(sizes["head_dim"] * share))
        sizes["max_position_embeddings"] = turned.longest_context(limit)
        return cls(
            **sizes,
            activation=activation_of(given, "hidden_act"),
            norm_eps=given["layer_norm_eps"],
            tie_word_embeddings=bool(given["tie_word_embeddings"]),
            shared_layer_qk_norm=bool(given["qk_layernorm"]),
            rope=turned,
        )


@final
class Persimmon(Decoder):
    block_class = GPTNeoXBlock


def _weights(config: PersimmonConfig) -> dict[str, Weight]:
    layer = "model.layers.{layer}."
    return {
        **fused_weights(layer, "self_attn."),
        "embedding": Weight.of("model.embed_tokens.weight", "v e"),
        "lm_head": Weight.of("lm_head.weight", "e v", "v e"),
        **layer_norm("blocks.attention.q_norm", layer + "self_attn.q_layernorm"),
        **layer_norm("blocks.attention.k_norm", layer + "self_attn.k_layernorm"),
        **layer_norm("norm", "model.final_layernorm"),
    }


FAMILY = Family(fields=_FIELDS, config=PersimmonConfig, decoder=Persimmon, weights=_weights)
