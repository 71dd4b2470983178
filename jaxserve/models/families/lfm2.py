"""LFM2: layers of short gated convolutions and of attention, with an MLP or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.models.config import DecoderConfig, Fields, LayerKind, kinds_by_name
from jaxserve.models.convolution import ConvolutionSizes, convolution_weights
from jaxserve.models.decoder import Decoder
from jaxserve.models.experts import ExpertNames, expert_weights
from jaxserve.models.family import Family
from jaxserve.models.llama_form import LAYER, attention_weights, rotary_decoder_fields
from jaxserve.models.rope import Rope
from jaxserve.models.routing import ExpertsConfig
from jaxserve.models.weights import Weight, gated_mlp

_SHARED = dict(
    vocab_size=65536,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=None,
    max_position_embeddings=128000,
    norm_eps=1e-5,
    tie_word_embeddings=True,
    rope_parameters=None,
    rope_scaling=None,
    rope_theta=1e6,
    conv_bias=False,
    conv_L_cache=3,
    layer_types=None,
)
_FIELDS = {
    "lfm2": Fields.of(
        _SHARED,
        hidden_size=2560,
        intermediate_size=12288,
        block_multiple_of=256,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=True,
        full_attn_idxs=None,
        # Names of the first releases.
        aliases={"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
    ),
    "lfm2_moe": Fields.of(
        _SHARED,
        hidden_size=2048,
        intermediate_size=7168,
        moe_intermediate_size=1792,
        num_dense_layers=2,
        num_experts=32,
        num_experts_per_tok=4,
        use_expert_bias=True,
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
        aliases={"tie_embedding": "tie_word_embeddings"},
    ),
}


@final
@dataclass(frozen=True, kw_only=True)
class LFM2Config(DecoderConfig):
    """Liquid AI's LFM2 (arXiv:2511.23404)."""

    rope: Rope | None = Rope()
    qk_norm: bool = True

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS[given["model_type"]].read(given)
        given |= {"rms_norm_eps": given["norm_eps"], "intermediate_size": _mlp_size(given)}
        attention = given.get("full_attn_idxs")
        kinds = given.pop("layer_types")
        fields = rotary_decoder_fields(given)
        sizes = ConvolutionSizes(
            channels=fields["hidden_size"],
            kernel_size=given["conv_L_cache"],
            has_bias=bool(given["conv_bias"]),
        )
        return cls(
            **fields,
            layer_kinds=_layer_kinds(kinds, attention, fields["num_layers"]),
            recurrence=sizes,
            **_mixture(given),
        )


def _mixture(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a model with experts in the layers after the first ones."""
    if "num_experts" not in given:
        return {}
    num_layers, num_dense = given["num_hidden_layers"], given["num_dense_layers"]
    return dict(
        experts=ExpertsConfig.from_hf(
            given, scores="sigmoid", has_correction=bool(given["use_expert_bias"])
        ),
        mlp_kinds=tuple("dense" if i < num_dense else "experts" for i in range(num_layers)),
    )


def _mlp_size(given: Mapping[str, Any]) -> int:
    """Return the size of an MLP: two thirds of the stated one, times a factor, rounded up."""
    size = given["intermediate_size"]
    if not given.get("block_auto_adjust_ff_dim"):
        return size
    unit = given["block_multiple_of"]
    size = int(given["block_ffn_dim_multiplier"] * int(2 * size / 3))
    return -(-size // unit) * unit


def _layer_kinds(
    kinds: list[str] | None, attention: list[int] | None, num_layers: int
) -> tuple[LayerKind, ...]:
    """Return the kind of each layer, or raise UnsupportedModelError for an unknown one."""
    if kinds is None:
        attention = list(range(num_layers)) if attention is None else attention
        kinds = ["full_attention" if i in attention else "conv" for i in range(num_layers)]
    return kinds_by_name(kinds, {"full_attention": "attention", "conv": "recurrent"}, num_layers)


_NAMES = ExpertNames(mlp="feed_forward.", correction="expert_bias", gate="w1", up="w3", down="w2")


def _weights(config: LFM2Config) -> dict[str, Weight]:
    attention, mixer = LAYER + "self_attn.", LAYER + "conv."
    return {
        **attention_weights(config),
        **expert_weights(config, LAYER, _NAMES),
        "blocks.attention.wo": Weight.of(attention + "out_proj.weight", "k g d e", "e (k g d)"),
        "blocks.attention.q_norm.scale": Weight.of(attention + "q_layernorm.weight", "d"),
        "blocks.attention.k_norm.scale": Weight.of(attention + "k_layernorm.weight", "d"),
        "blocks.attention_norm.scale": Weight.of(LAYER + "operator_norm.weight"),
        "blocks.mixer_norm.scale": Weight.of(LAYER + "operator_norm.weight"),
        "blocks.mixer.project": Weight.of(mixer + "in_proj.weight", "e u c", "(u c) e"),
        "blocks.mixer.bproject": Weight.of(mixer + "in_proj.bias", "u c", "(u c)"),
        **convolution_weights("blocks.mixer.convolution", mixer + "conv"),
        "blocks.mixer.out": Weight.of(mixer + "out_proj.weight", "c e", "e c"),
        "blocks.mixer.bout": Weight.of(mixer + "out_proj.bias"),
        "blocks.mlp_norm.scale": Weight.of(LAYER + "ffn_norm.weight"),
        **gated_mlp("blocks.mlp", LAYER + "feed_forward.", ("w1", "w3", "w2")),
        "norm.scale": Weight.of("model.embedding_norm.weight"),
    }


FAMILY = Family(fields=_FIELDS, config=LFM2Config, decoder=Decoder, weights=_weights)
