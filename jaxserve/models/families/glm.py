"""Llama's layers whose checkpoints rotate neighbouring dimensions: GLM-4, ERNIE 4.5, Helium."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.models.config import DecoderConfig, Fields, check_is
from jaxserve.models.decoder import Decoder
from jaxserve.models.families.gemma import GemmaBlock
from jaxserve.models.family import Family
from jaxserve.models.layers import Block
from jaxserve.models.llama_form import (
    LAYER,
    ROTARY_FIELDS,
    LlamaBlock,
    attention_weights,
    mlp_weights,
    rotary_decoder_fields,
)
from jaxserve.models.rope import Rope
from jaxserve.models.weights import Weight, neighbours

_GLM = Fields.of(
    ROTARY_FIELDS,
    vocab_size=151552,
    intermediate_size=13696,
    num_hidden_layers=40,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1.5625e-7,
    partial_rotary_factor=0.5,
    attention_bias=True,
    pad_token_id=151329,
)
_FIELDS = {
    "glm": Fields(_GLM.defaults, nullable=("head_dim", "num_key_value_heads"), pad_token_id=151329),
    "glm4": _GLM,
    "ernie4_5": Fields.of(
        ROTARY_FIELDS,
        vocab_size=103424,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=18,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        tie_word_embeddings=True,
        use_bias=False,
        nullable=("head_dim", "num_key_value_heads", "use_bias"),
    ),
    "helium": Fields.of(
        ROTARY_FIELDS,
        vocab_size=48000,
        hidden_size=2560,
        intermediate_size=7040,
        num_hidden_layers=24,
        num_attention_heads=20,
        num_key_value_heads=20,
        head_dim=128,
        max_position_embeddings=4096,
        rms_norm_eps=1e-8,
        rope_theta=1e5,
        attention_bias=False,
        mlp_bias=False,
        pad_token_id=3,
    ),
}


@final
@dataclass(frozen=True, kw_only=True)
class GlmConfig(DecoderConfig):
    """GLM-4 (arXiv:2406.12793), GLM-4-0414 with norms on both sides, and their relatives."""

    rope: Rope | None = Rope()
    has_end_norms: bool = False  # whether norms also follow attention and MLP
    fuses_gate: bool = False  # whether checkpoints have one tensor for gate and up

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        kind = given["model_type"]
        given = _FIELDS[kind].read(given)
        check_is(given, "hidden_act", ("silu", "swish"))
        bias = bool(given.get("use_bias"))
        return cls(
            **rotary_decoder_fields(given, given.get("partial_rotary_factor")),
            qkv_bias=bias or bool(given.get("attention_bias")),
            o_bias=bias,
            mlp_bias=bias or bool(given.get("mlp_bias")),
            has_end_norms=kind == "glm4",
            fuses_gate=kind.startswith("glm"),
        )


@final
class Glm(Decoder):
    block_class = LlamaBlock
    config: GlmConfig  # pyrefly: ignore[bad-override-mutable-attribute]

    def _block_class(self, layer: int) -> type[Block]:
        return GemmaBlock if self.config.has_end_norms else LlamaBlock


def _weights(config: GlmConfig) -> dict[str, Weight]:
    assert config.rope is not None
    order = neighbours(config.rope.dim or config.head_dim, config.head_dim)
    weights = attention_weights(config, order=order) | mlp_weights()
    if config.fuses_gate:
        name = LAYER + "mlp.gate_up_proj.weight"
        weights["blocks.mlp.gate_up"] = Weight.of(name, "e u m", "(u m) e")
    end_norms = {
        "blocks.attention_end_norm.scale": "post_self_attn_layernorm.weight",
        "blocks.mlp_end_norm.scale": "post_mlp_layernorm.weight",
    }
    return weights | {path: Weight.of(LAYER + name) for path, name in end_norms.items()}


FAMILY = Family(fields=_FIELDS, config=GlmConfig, decoder=Glm, weights=_weights)
