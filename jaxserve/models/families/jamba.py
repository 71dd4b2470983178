"""Jamba: layers of Mamba and of attention, with an MLP or a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.models.config import DecoderConfig, Fields, check_is, plain_sizes
from jaxserve.models.decoder import Decoder
from jaxserve.models.experts import ExpertNames, expert_weights
from jaxserve.models.family import Family
from jaxserve.models.llama_form import LAYER, attention_weights, mlp_weights
from jaxserve.models.mamba1 import mamba1_sizes, mixer_weights
from jaxserve.models.routing import ExpertsConfig
from jaxserve.models.weights import Weight

_FIELDS = {
    "jamba": Fields.of(
        vocab_size=65536,
        tie_word_embeddings=False,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,
        num_experts_per_tok=2,
        num_experts=16,
        expert_layer_period=2,
        expert_layer_offset=1,
        attn_layer_period=8,
        attn_layer_offset=4,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank="auto",
        mamba_conv_bias=True,
        mamba_proj_bias=False,
        aliases={"num_local_experts": "num_experts"},
        pad_token_id=0,
    )
}


@final
@dataclass(frozen=True, kw_only=True)
class JambaConfig(DecoderConfig):
    """Lieber et al., arXiv:2403.19887; attention has no positions."""

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS["jamba"].read(given)
        check_is(given, "hidden_act", ("silu", "swish"))
        sizes = plain_sizes(given) | dict(num_kv_heads=given["num_key_value_heads"])
        layers, has_experts = range(given["num_hidden_layers"]), given["num_experts"] > 1
        attention, sparse = (
            {i for i in layers if i % given[f"{what}_period"] == given[f"{what}_offset"]}
            for what in ("attn_layer", "expert_layer")
        )
        return cls(
            **sizes,
            norm_eps=given["rms_norm_eps"],
            tie_word_embeddings=bool(given["tie_word_embeddings"]),
            layer_kinds=tuple("attention" if i in attention else "recurrent" for i in layers),
            mlp_kinds=tuple("experts" if has_experts and i in sparse else "dense" for i in layers),
            experts=ExpertsConfig.from_hf(given, normalises_gates=False),
            recurrence=mamba1_sizes(
                given["hidden_size"],
                expand=given["mamba_expand"],
                step_rank=given["mamba_dt_rank"],
                state_size=given["mamba_d_state"],
                kernel_size=given["mamba_d_conv"],
                has_bias=bool(given["mamba_proj_bias"]),
                has_conv_bias=bool(given["mamba_conv_bias"]),
                norm="scaled",
                norm_eps=given["rms_norm_eps"],
            ),
        )


def _weights(config: JambaConfig) -> dict[str, Weight]:
    names = ExpertNames(mlp="feed_forward.", router="router.weight")
    return {
        **attention_weights(config),
        **mlp_weights("feed_forward."),
        **expert_weights(config, LAYER, names),
        **mixer_weights("blocks.mixer.", LAYER + "mamba."),
        "blocks.mixer_norm.scale": Weight.of(LAYER + "input_layernorm.weight"),
        "blocks.mlp_norm.scale": Weight.of(LAYER + "pre_ff_layernorm.weight"),
        "norm.scale": Weight.of("model.final_layernorm.weight"),
    }


FAMILY = Family(fields=_FIELDS, config=JambaConfig, decoder=Decoder, weights=_weights)
