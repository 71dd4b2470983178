"""Qwen3-Next and the text of Qwen3.5: layers of gated delta rules, and of gated attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, final

import numpy as np

from jaxserve.models.config import DecoderConfig, Fields, kinds_by_name, kinds_in_turn
from jaxserve.models.convolution import convolution_weights
from jaxserve.models.decoder import Decoder
from jaxserve.models.delta_rule import DeltaRuleSizes
from jaxserve.models.experts import ExpertNames, expert_weights
from jaxserve.models.families.moe import sparse_layers
from jaxserve.models.family import Family
from jaxserve.models.llama_form import (
    LAYER,
    ROTARY_FIELDS,
    attention_weights,
    mlp_weights,
    rotary_decoder_fields,
)
from jaxserve.models.rope import Rope
from jaxserve.models.routing import ExpertsConfig
from jaxserve.models.weights import Tensor, Weight

_SHARED = ROTARY_FIELDS | dict(
    head_dim=256,
    max_position_embeddings=32768,
    attention_bias=False,
    partial_rotary_factor=0.25,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    layer_types=None,
    full_attention_interval=4,
)
_EXPERTS = dict(
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    num_experts=512,
    num_experts_per_tok=10,
)
_FIELDS = {
    "qwen3_next": Fields.of(
        _SHARED,
        _EXPERTS,
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=48,
        num_attention_heads=16,
        num_key_value_heads=2,
        decoder_sparse_step=1,
        mlp_only_layers=None,
        norm_topk_prob=True,
    ),
    "qwen3_5_moe_text": Fields.of(
        _SHARED,
        _EXPERTS,
        without=("intermediate_size",),
        vocab_size=248320,
        hidden_size=2048,
        num_hidden_layers=40,
        num_attention_heads=16,
        num_key_value_heads=2,
        num_experts=256,
        num_experts_per_tok=8,
    ),
    "qwen3_5_text": Fields.of(
        _SHARED,
        vocab_size=248320,
        intermediate_size=12288,
        num_attention_heads=16,
        num_key_value_heads=4,
    ),
}


@final
@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(DecoderConfig):
    """Norms are centred at zero, and attention has a gate."""

    rope: Rope | None = Rope()
    norm_offset: float = 1.0
    qk_norm: bool = True
    attention_gate: bool = True
    # Whether a checkpoint has all projections of a mixer, and its rates, sorted by head of keys.
    sorts_projections: bool = False
    sorts_rates: bool = False

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        kind = given["model_type"]
        given = _FIELDS[kind].read(given)
        kinds, num_layers = given.pop("layer_types"), given["num_hidden_layers"]
        if kinds is None:
            every = given["full_attention_interval"]
            kinds = kinds_in_turn(num_layers, every, "linear_attention")
        if kind == "qwen3_5_moe_text":  # all of its layers have experts
            size = given["moe_intermediate_size"]
            given |= dict(intermediate_size=size, mlp_only_layers=None, decoder_sparse_step=1)
        return cls(
            **rotary_decoder_fields(given, share=given["partial_rotary_factor"]),
            layer_kinds=kinds_by_name(
                kinds, {"full_attention": "attention", "linear_attention": "recurrent"}, num_layers
            ),
            sorts_projections=kind == "qwen3_next",
            sorts_rates=kind == "qwen3_next",
            experts=_experts(given),
            mlp_kinds=() if kind == "qwen3_5_text" else sparse_layers(given),
            recurrence=DeltaRuleSizes(
                num_key_heads=given["linear_num_key_heads"],
                num_value_heads=given["linear_num_value_heads"],
                key_dim=given["linear_key_head_dim"],
                value_dim=given["linear_value_head_dim"],
                kernel_size=given["linear_conv_kernel_dim"],
            ),
        )

    def fitted_to(self, shapes: Mapping[str, tuple[int, ...]]) -> Self:
        found = super().fitted_to(shapes)
        if any(name.endswith(".in_proj_qkv.weight") for name in shapes):  # GGUF files of Qwen3-Next
            found = replace(found, sorts_projections=False)
        return found


def _experts(given: Mapping[str, Any]) -> ExpertsConfig | None:
    if "num_experts" not in given:
        return None
    size = given["shared_expert_intermediate_size"]
    return ExpertsConfig.from_hf(given, shared_size=size, has_shared_gate=True)


def _weights(config: Qwen3NextConfig) -> dict[str, Weight]:
    mixer = LAYER + "linear_attn."
    return {
        **attention_weights(config),
        **mlp_weights(),
        **expert_weights(config, LAYER, ExpertNames()),
        **_projections(config, mixer),
        **convolution_weights("blocks.mixer.convolution", mixer + "conv1d"),
        "blocks.mixer_norm.scale": Weight.of(LAYER + "input_layernorm.weight"),
        "blocks.mixer.out": Weight.of(mixer + "out_proj.weight", "i e", "e i"),
        "blocks.mixer.scale": Weight.of(mixer + "norm.weight", "d"),
        "blocks.mixer.a_log": Weight.of(mixer + "A_log", "k g", "(k g)"),
        "blocks.mixer.step_bias": Weight.of(mixer + "dt_bias", "k g", "(k g)"),
    }


def _projections(config: Qwen3NextConfig, mixer: str) -> dict[str, Weight]:
    """Return the weights of a mixer's input projections."""
    sizes = config.recurrence
    assert isinstance(sizes, DeltaRuleSizes)
    if config.sorts_projections:
        # A head of keys: its query, its key, its values, their gates.
        heads, own = sizes.num_key_heads, sizes.group * sizes.value_dim
        widths = (sizes.key_dim, sizes.key_dim, own, own)
        places = np.split(
            np.arange(heads * sum(widths)).reshape(heads, -1), np.cumsum(widths)[:-1], axis=1
        )
        order = np.concatenate([place.reshape(-1) for place in places])
        project = (Tensor(mixer + "in_proj_qkvz.weight", "w e", order={"w": order}),)
    else:
        end = sizes.channels + sizes.inner
        project = (
            Tensor(mixer + "in_proj_qkv.weight", "w e", w=slice(0, sizes.channels)),
            Tensor(mixer + "in_proj_z.weight", "w e", w=slice(sizes.channels, end)),
        )
    rates = (
        Tensor(mixer + "in_proj_b.weight", "(k g) e", u=0),
        Tensor(mixer + "in_proj_a.weight", "(k g) e", u=1),
    )
    if config.sorts_rates:
        rates = (Tensor(mixer + "in_proj_ba.weight", "(k u g) e"),)
    return {
        "blocks.mixer.project": Weight("e w", project),
        "blocks.mixer.rates": Weight("e u k g", rates),
    }


FAMILY = Family(
    fields=_FIELDS,
    config=Qwen3NextConfig,
    decoder=Decoder,
    weights=_weights,
    # Layers that predict further tokens are not read.
    ignored=r".*\.rotary_emb\.inv_freq|mtp\..*",
)
