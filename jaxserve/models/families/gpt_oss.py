"""gpt-oss: mixtures of experts with biases and clamped gates, attention with sinks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.models.config import DecoderConfig, Fields
from jaxserve.models.experts import ExpertNames, expert_weights
from jaxserve.models.families.moe import MoEDecoder
from jaxserve.models.family import Family
from jaxserve.models.llama_form import (
    LAYER,
    ROTARY_FIELDS,
    attention_weights,
    rotary_decoder_fields,
)
from jaxserve.models.rope import Rope
from jaxserve.models.routing import ClampedGate, ExpertsConfig
from jaxserve.models.weights import Weight

_FIELDS = {
    "gpt_oss": Fields.of(
        ROTARY_FIELDS,
        without=("hidden_act",),
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=36,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        attention_bias=True,
        sliding_window=128,
        layer_types=None,
        num_local_experts=128,
        num_experts_per_tok=4,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        nullable=("sliding_window",),
        aliases={"num_experts": "num_local_experts"},
    )
}
# The rotation of a config.json that has none.
_ROTATION = dict(
    rope_type="yarn",
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=4096,
)


@final
@dataclass(frozen=True, kw_only=True)
class GptOssConfig(DecoderConfig):
    """gpt-oss-20b and gpt-oss-120b (arXiv:2508.10925)."""

    rope: Rope | None = Rope()
    has_sinks: bool = True

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS["gpt_oss"].read(given)
        if given["rope_parameters"] is None:
            given["rope_parameters"] = _ROTATION
        if given["layer_types"] is None:
            kinds = "sliding_attention", "full_attention"
            given["layer_types"] = [kinds[i % 2] for i in range(given["num_hidden_layers"])]
        bias = bool(given["attention_bias"])
        return cls(
            **rotary_decoder_fields(given),
            qkv_bias=bias,
            o_bias=bias,
            experts=ExpertsConfig(
                num=given["num_local_experts"],
                size=given["intermediate_size"],
                per_token=given["num_experts_per_tok"],
                has_router_bias=True,
                has_bias=True,
                clamped_gate=ClampedGate(slope=given["swiglu_alpha"], limit=given["swiglu_limit"]),
                layout="in_out",
            ),
        )


_NAMES = ExpertNames(router="router.weight", router_bias="router.bias", both="(m u)")


def _weights(config: GptOssConfig) -> dict[str, Weight]:
    return attention_weights(config) | expert_weights(config, LAYER, _NAMES)


FAMILY = Family(fields=_FIELDS, config=GptOssConfig, decoder=MoEDecoder, weights=_weights)
