"""Mixtral, Qwen2-MoE, Qwen3-MoE and the text of its VL model, OLMoE.

Their layers are Llama's, with a mixture of experts instead of the MLP in all or some.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Self, final

from jaxserve.models.config import DecoderConfig, Fields, MLPKind, check_is
from jaxserve.models.decoder import Decoder
from jaxserve.models.experts import ExpertNames, MixtureOfExperts, expert_weights
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
from jaxserve.models.norms import RMSNorm
from jaxserve.models.rope import Rope
from jaxserve.models.routing import ExpertsConfig

_QWEN = ROTARY_FIELDS | dict(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=16,
    moe_intermediate_size=1408,
    num_experts=60,
    num_experts_per_tok=4,
    decoder_sparse_step=1,
    mlp_only_layers=None,
)
_FIELDS = {
    "mixtral": Fields.of(
        ROTARY_FIELDS,
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        sliding_window=None,
        num_local_experts=8,
        num_experts_per_tok=2,
        aliases={"num_experts": "num_local_experts"},
    ),
    "qwen2_moe": Fields.of(
        _QWEN,
        max_position_embeddings=32768,
        qkv_bias=True,
        use_sliding_window=False,
        sliding_window=4096,
        max_window_layers=28,
        layer_types=None,
        shared_expert_intermediate_size=5632,
        norm_topk_prob=False,
        nullable=("num_key_value_heads", "sliding_window"),
    ),
    "qwen3_moe": Fields.of(
        _QWEN,
        intermediate_size=6144,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        attention_bias=False,
        use_sliding_window=False,
        sliding_window=4096,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=False,
        nullable=("sliding_window",),
        aliases={"num_local_experts": "num_experts"},
    ),
    "qwen3_vl_moe_text": Fields.of(
        _QWEN,
        max_position_embeddings=128000,
        rope_theta=5e5,
        attention_bias=False,
        tie_word_embeddings=True,
        aliases={"num_local_experts": "num_experts"},
    ),
    "olmoe": Fields.of(
        ROTARY_FIELDS,
        vocab_size=50304,
        hidden_size=2048,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=16,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        attention_bias=False,
        clip_qkv=None,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=False,
        aliases={"num_local_experts": "num_experts"},
    ),
}


@final
@dataclass(frozen=True, kw_only=True)
class MoEConfig(DecoderConfig):
    """Mixtral (arXiv:2401.04088), Qwen2 and 3 (2407.10671, 2505.09388), OLMoE (2409.02060)."""

    rope: Rope | None = Rope()
    expert_names: ExpertNames = ExpertNames()

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        kind = given["model_type"]
        given = _FIELDS[kind].read(given)
        check_is(given, "hidden_act", ("silu", "swish"))
        return cls(**_READERS[kind](given))


def _mixtral(given: dict[str, Any]) -> dict[str, Any]:
    return rotary_decoder_fields(given) | dict(
        experts=ExpertsConfig(
            num=given["num_local_experts"],
            size=given["intermediate_size"],
            per_token=given["num_experts_per_tok"],
        ),
        expert_names=MIXTRAL_NAMES,
    )


def _qwen2(given: dict[str, Any]) -> dict[str, Any]:
    if given["layer_types"] is None:
        num_layers, last = given["num_hidden_layers"], given["max_window_layers"]
        given["layer_types"] = [
            "sliding_attention" if i % 2 == 0 and i < last else "full_attention"
            for i in range(num_layers)
        ]
    experts = replace(
        _experts(given), shared_size=given["shared_expert_intermediate_size"], has_shared_gate=True
    )
    return rotary_decoder_fields(given) | dict(
        qkv_bias=bool(given["qkv_bias"]), experts=experts, mlp_kinds=sparse_layers(given)
    )


def _qwen3(given: dict[str, Any]) -> dict[str, Any]:
    bias = bool(given["attention_bias"])
    return rotary_decoder_fields(given) | dict(
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        experts=_experts(given),
        mlp_kinds=sparse_layers(given),
    )


def _qwen3_vl(given: dict[str, Any]) -> dict[str, Any]:
    fields = _qwen3({**given, "norm_topk_prob": True})
    return fields | {"experts": replace(fields["experts"], layout="in_out")}


def _olmoe(given: dict[str, Any]) -> dict[str, Any]:
    bias = bool(given["attention_bias"])
    return rotary_decoder_fields(given) | dict(
        qkv_bias=bias,
        o_bias=bias,
        wide_qk_norm=True,
        qkv_clip=given["clip_qkv"],
        experts=_experts(given),
    )


_READERS: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = MappingProxyType(
    {
        "mixtral": _mixtral,
        "qwen2_moe": _qwen2,
        "qwen3_moe": _qwen3,
        "qwen3_vl_moe_text": _qwen3_vl,
        "olmoe": _olmoe,
    }
)


def _experts(given: Mapping[str, Any]) -> ExpertsConfig:
    """Return the experts of Qwen's models and OLMoE, without shared ones."""
    return ExpertsConfig(
        num=given["num_experts"],
        size=given.get("moe_intermediate_size", given["intermediate_size"]),
        per_token=given["num_experts_per_tok"],
        normalises_gates=bool(given["norm_topk_prob"]),
    )


def sparse_layers(given: Mapping[str, Any]) -> tuple[MLPKind, ...]:
    """Return the kind of each layer's MLP, by Qwen's fields."""
    dense, step = given["mlp_only_layers"] or (), given["decoder_sparse_step"]
    layers = range(given["num_hidden_layers"] if given["num_experts"] > 0 else 0)
    sparse = {i for i in layers if i not in dense and (i + 1) % step == 0}
    return tuple("experts" if i in sparse else "dense" for i in range(given["num_hidden_layers"]))


MIXTRAL_NAMES = ExpertNames(mlp="block_sparse_moe.", gate="w1", up="w3", down="w2")


@final
class MoEBlock(Block):
    norm_class = RMSNorm
    mlp_class = MixtureOfExperts


@final
class MoEDecoder(Decoder):
    block_class = MoEBlock

    def _block_class(self, layer: int) -> type[Block]:
        return MoEBlock if self.config.mlp_kinds[layer] == "experts" else LlamaBlock


FAMILY = Family(
    fields=_FIELDS,
    config=MoEConfig,
    decoder=MoEDecoder,
    weights=lambda config: (
        attention_weights(config)
        | mlp_weights()
        | expert_weights(config, LAYER, config.expert_names)
    ),
)
