"""Phi-3.5-MoE: layer norms, biases, and a router that chooses two experts one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig, Fields, check_is
from jaxserve.models.decoder import Decoder
from jaxserve.models.experts import MixtureOfExperts, expert_weights
from jaxserve.models.families.moe import MIXTRAL_NAMES
from jaxserve.models.family import Family
from jaxserve.models.layers import Block
from jaxserve.models.llama_form import (
    LAYER,
    ROTARY_FIELDS,
    attention_weights,
    rotary_decoder_fields,
)
from jaxserve.models.norms import LayerNorm
from jaxserve.models.rope import Rope, rope_fields
from jaxserve.models.routing import ExpertsConfig
from jaxserve.models.weights import Weight, layer_norm

_FIELDS = {
    "phimoe": Fields.of(
        ROTARY_FIELDS,
        vocab_size=32064,
        intermediate_size=6400,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        sliding_window=None,
        attention_bias=False,
        lm_head_bias=False,
        num_experts_per_tok=2,
        num_local_experts=16,
        router_jitter_noise=0.01,
    )
}


@final
@dataclass(frozen=True, kw_only=True)
class PhiMoEConfig(DecoderConfig):
    """Phi-3.5-MoE (arXiv:2404.14219), whose router is GRIN's (arXiv:2409.12136)."""

    rope: Rope | None = Rope()

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS["phimoe"].read(given)
        check_is(given, "hidden_act", ("silu", "swish"))
        check_is(given, "num_experts_per_tok", (2,))
        rotation = rope_fields(given)
        if rotation.get("rope_type", rotation.get("type", "default")) != "default":
            low, high = rotation.get("short_mscale"), rotation.get("long_mscale")
            if low is None or low != high:
                raise UnsupportedModelError(
                    f"short_mscale={low} and long_mscale={high} of the rotation are not supported; "
                    "give the same number for both"
                )
            given["rope_scaling"] = rotation | {"attention_factor": low}
        bias = bool(given["attention_bias"])
        return cls(
            **rotary_decoder_fields(given),
            qkv_bias=bias,
            o_bias=bias,
            lm_head_bias=bool(given["lm_head_bias"]),
            experts=ExpertsConfig(
                num=given["num_local_experts"],
                size=given["intermediate_size"],
                per_token=2,
                near_best=2.0 * given["router_jitter_noise"],
            ),
        )


@final
class PhiMoEBlock(Block):
    norm_class = LayerNorm
    mlp_class = MixtureOfExperts


@final
class PhiMoE(Decoder):
    block_class = PhiMoEBlock


def _weights(config: PhiMoEConfig) -> dict[str, Weight]:
    return {
        **attention_weights(config),
        **expert_weights(config, LAYER, MIXTRAL_NAMES),
        **layer_norm("norm", "model.norm"),
        **layer_norm("blocks.attention_norm", LAYER + "input_layernorm"),
        **layer_norm("blocks.mlp_norm", LAYER + "post_attention_layernorm"),
        "lm_head_bias": Weight.of("lm_head.bias", "v"),
    }


FAMILY = Family(fields=_FIELDS, config=PhiMoEConfig, decoder=PhiMoE, weights=_weights)
