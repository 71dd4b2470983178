"""Mixtral and Qwen3-MoE: Llama's layers with a mixture of experts instead of the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.models.config import DecoderConfig, Fields, MLPKind, check_is
from jaxserve.models.decoder import Decoder
from jaxserve.models.experts import ExpertNames, MixtureOfExperts, expert_weights
from jaxserve.models.families.llama import (
    LAYER,
    ROTARY_FIELDS,
    attention_weights,
    mlp_weights,
    rotary_decoder_fields,
)
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, GatedMLP
from jaxserve.models.norms import RMSNorm
from jaxserve.models.rope import Rope
from jaxserve.models.routing import ExpertsConfig
from jaxserve.models.weights import Weight

_FIELDS = {
    "mixtral": Fields(
        ROTARY_FIELDS
        | dict(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
            sliding_window=None,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        aliases={"num_experts": "num_local_experts"},
    ),
    "qwen3_moe": Fields(
        ROTARY_FIELDS
        | dict(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=24,
            num_key_value_heads=4,
            max_position_embeddings=32768,
            attention_bias=False,
            use_sliding_window=False,
            sliding_window=4096,
            decoder_sparse_step=1,
            mlp_only_layers=None,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=False,
        ),
        nullable=("sliding_window",),
        aliases={"num_local_experts": "num_experts"},
    ),
}


@final
@dataclass(frozen=True, kw_only=True)
class MoEConfig(DecoderConfig):
    """Mixtral (arXiv:2401.04088), Qwen3-MoE (arXiv:2505.09388)."""

    rope: Rope | None = Rope()
    expert_names: ExpertNames = ExpertNames()

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS[given["model_type"]].read(given)
        check_is(given, "hidden_act", ("silu", "swish"))
        fields = rotary_decoder_fields(given)
        if given["model_type"] == "mixtral":
            return cls(
                **fields,
                experts=ExpertsConfig(
                    num=given["num_local_experts"],
                    size=given["intermediate_size"],
                    per_token=given["num_experts_per_tok"],
                ),
                expert_names=_MIXTRAL_NAMES,
            )
        bias = bool(given["attention_bias"])
        return cls(
            **fields,
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            experts=ExpertsConfig(
                num=given["num_experts"],
                size=given["moe_intermediate_size"],
                per_token=given["num_experts_per_tok"],
                normalises_gates=bool(given["norm_topk_prob"]),
            ),
            mlp_kinds=sparse_layers(given),
        )


def sparse_layers(given: Mapping[str, Any]) -> tuple[MLPKind, ...]:
    """Return the kind of each layer's MLP, by Qwen's fields."""
    dense, step = given["mlp_only_layers"] or (), given["decoder_sparse_step"]
    return tuple(
        "experts"
        if given["num_experts"] > 0 and layer not in dense and (layer + 1) % step == 0
        else "dense"
        for layer in range(given["num_hidden_layers"])
    )


_MIXTRAL_NAMES = ExpertNames(mlp="block_sparse_moe.", gate="w1", up="w3", down="w2")


@final
class MoEBlock(Block):
    norm_class = RMSNorm
    mlp_class = MixtureOfExperts


@final
class DenseBlock(Block):
    norm_class = RMSNorm
    mlp_class = GatedMLP


@final
class MoEDecoder(Decoder):
    block_class = MoEBlock

    def _block_class(self, layer: int) -> type[Block]:
        return MoEBlock if self.config.mlp_kinds[layer] == "experts" else DenseBlock


def _weights(config: MoEConfig) -> dict[str, Weight]:
    return {
        **attention_weights(config),
        **mlp_weights(),
        **expert_weights(config, LAYER, config.expert_names),
    }


FAMILY = Family(fields=_FIELDS, config=MoEConfig, decoder=MoEDecoder, weights=_weights)
