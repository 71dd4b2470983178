"""Mixtral, Qwen2-MoE, Qwen3-MoE and the text of its VL model, OLMoE, GLM-4.5, and their relatives.

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
from jaxserve.models.weights import Weight, neighbours

# Which layers of Qwen's models have experts.
_SPARSE = dict(decoder_sparse_step=1, mlp_only_layers=None)
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
    "qwen2_moe": Fields(
        ROTARY_FIELDS
        | _SPARSE
        | dict(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=16,
            max_position_embeddings=32768,
            qkv_bias=True,
            use_sliding_window=False,
            sliding_window=4096,
            max_window_layers=28,
            layer_types=None,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            num_experts=60,
            num_experts_per_tok=4,
            norm_topk_prob=False,
        ),
        nullable=("num_key_value_heads", "sliding_window"),
    ),
    "qwen3_moe": Fields(
        ROTARY_FIELDS
        | _SPARSE
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
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=False,
        ),
        nullable=("sliding_window",),
        aliases={"num_local_experts": "num_experts"},
    ),
    "qwen3_vl_moe_text": Fields(
        ROTARY_FIELDS
        | _SPARSE
        | dict(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=16,
            max_position_embeddings=128000,
            rope_theta=5e5,
            attention_bias=False,
            moe_intermediate_size=1408,
            num_experts=60,
            num_experts_per_tok=4,
            tie_word_embeddings=True,
        ),
        aliases={"num_local_experts": "num_experts"},
    ),
    "olmoe": Fields(
        ROTARY_FIELDS
        | dict(
            vocab_size=50304,
            hidden_size=2048,
            intermediate_size=2048,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=None,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            attention_bias=False,
            clip_qkv=None,
            num_experts=64,
            num_experts_per_tok=8,
            norm_topk_prob=False,
        ),
        aliases={"num_local_experts": "num_experts"},
    ),
    "glm4_moe": Fields(
        ROTARY_FIELDS
        | dict(
            vocab_size=151552,
            hidden_size=4096,
            intermediate_size=10944,
            num_hidden_layers=46,
            num_attention_heads=96,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            partial_rotary_factor=0.5,
            attention_bias=False,
            use_qk_norm=False,
            moe_intermediate_size=1408,
            num_experts_per_tok=8,
            n_shared_experts=1,
            n_routed_experts=128,
            routed_scaling_factor=1.0,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            norm_topk_prob=True,
        ),
        aliases={"num_local_experts": "n_routed_experts"},
    ),
    "dots1": Fields(
        ROTARY_FIELDS
        | dict(
            vocab_size=152064,
            hidden_size=4608,
            intermediate_size=10944,
            num_hidden_layers=62,
            num_key_value_heads=32,
            max_position_embeddings=2048,
            attention_bias=False,
            sliding_window=4096,
            max_window_layers=62,
            layer_types=None,
            moe_intermediate_size=1408,
            num_experts_per_tok=None,
            n_shared_experts=None,
            n_routed_experts=None,
            routed_scaling_factor=1.0,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=0,
            norm_topk_prob=False,
        ),
        nullable=("num_key_value_heads", "sliding_window", "norm_topk_prob"),
        aliases={"num_local_experts": "n_routed_experts"},
    ),
    "ernie4_5_moe": Fields(
        ROTARY_FIELDS
        | dict(
            vocab_size=103424,
            hidden_size=2560,
            intermediate_size=12288,
            num_hidden_layers=28,
            num_attention_heads=20,
            num_key_value_heads=4,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=5e5,
            tie_word_embeddings=True,
            use_bias=False,
            moe_intermediate_size=1536,
            moe_k=6,
            moe_num_experts=64,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            moe_layer_end_index=-1,
            moe_layer_interval=1,
        ),
        nullable=("num_key_value_heads", "use_bias"),
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    ),
    "minimax_m2": Fields(
        ROTARY_FIELDS
        | dict(
            vocab_size=200064,
            hidden_size=3072,
            intermediate_size=1536,
            num_hidden_layers=62,
            num_attention_heads=48,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=196608,
            rope_theta=5e6,
            rotary_dim=None,
            num_local_experts=256,
            num_experts_per_tok=8,
        ),
        aliases={"num_experts": "num_local_experts"},
    ),
}


@final
@dataclass(frozen=True, kw_only=True)
class MoEConfig(DecoderConfig):
    """Mixtral (arXiv:2401.04088), Qwen2-MoE (arXiv:2407.10671), Qwen3-MoE (arXiv:2505.09388).

    OLMoE (arXiv:2409.02060), GLM-4.5 (arXiv:2508.06471), dots.llm1 (arXiv:2506.05767), ERNIE 4.5
    (Baidu 2025) and MiniMax-M2 (MiniMax 2025).
    """

    rope: Rope | None = Rope()
    expert_names: ExpertNames = ExpertNames()
    rotates_neighbours: bool = False  # whether checkpoints rotate neighbouring dimensions

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
        qwen_experts(given),
        shared_size=given["shared_expert_intermediate_size"],
        has_shared_gate=True,
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
        experts=qwen_experts(given),
        mlp_kinds=sparse_layers(given),
    )


def _qwen3_vl(given: dict[str, Any]) -> dict[str, Any]:
    fields = _qwen3({**given, "norm_topk_prob": True})
    return fields | {"experts": replace(fields["experts"], layout="in_out")}


def _olmoe(given: dict[str, Any]) -> dict[str, Any]:
    bias = bool(given["attention_bias"])
    sized = {**given, "moe_intermediate_size": given["intermediate_size"]}
    return rotary_decoder_fields(given) | dict(
        qkv_bias=bias,
        o_bias=bias,
        wide_qk_norm=True,
        qkv_clip=given["clip_qkv"],
        experts=qwen_experts(sized),
    )


def _glm(given: dict[str, Any]) -> dict[str, Any]:
    return rotary_decoder_fields(given, given["partial_rotary_factor"]) | dict(
        qkv_bias=bool(given["attention_bias"]),
        qk_norm=bool(given["use_qk_norm"]),
        **grouped_experts(given),
    )


def _dots(given: dict[str, Any]) -> dict[str, Any]:
    bias = bool(given["attention_bias"])
    return rotary_decoder_fields(given) | dict(
        qkv_bias=bias, o_bias=bias, qk_norm=True, **grouped_experts(given)
    )


def grouped_experts(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields about experts of models whose routers are DeepSeek-V3's."""
    num, size = given["n_routed_experts"] or 0, given["moe_intermediate_size"]
    first = given["first_k_dense_replace"] if num else given["num_hidden_layers"]
    return dict(
        experts=ExpertsConfig(
            num=num,
            size=size,
            per_token=given["num_experts_per_tok"] or 0,
            scores="sigmoid",
            normalises_gates=bool(given["norm_topk_prob"]),
            gate_scale=float(given["routed_scaling_factor"]),
            num_groups=given["n_group"],
            num_chosen_groups=given["topk_group"],
            has_correction=True,
            shared_size=size * (given["n_shared_experts"] or 0) or None,
        ),
        mlp_kinds=tuple(
            "dense" if layer < first else "experts" for layer in range(given["num_hidden_layers"])
        ),
        expert_names=_SEVERAL_SHARED,
    )


def _ernie(given: dict[str, Any]) -> dict[str, Any]:
    bias, size = bool(given["use_bias"]), given["moe_intermediate_size"]
    num_layers, end = given["num_hidden_layers"], given["moe_layer_end_index"]
    sparse = range(given["moe_layer_start_index"], num_layers if end == -1 else end + 1)
    return rotary_decoder_fields(given) | dict(
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        lm_head_bias=bias,
        experts=ExpertsConfig(
            num=given["moe_num_experts"],
            size=size,
            per_token=given["moe_k"],
            has_correction=True,
            shared_size=size * given["moe_num_shared_experts"] or None,
        ),
        mlp_kinds=tuple(
            "experts"
            if layer in sparse and (layer + 1) % given["moe_layer_interval"] == 0
            else "dense"
            for layer in range(num_layers)
        ),
        expert_names=replace(
            _SEVERAL_SHARED,
            correction="moe_statics.e_score_correction_bias",
            correction_layout="() n",
        ),
        rotates_neighbours=True,
    )


def _minimax(given: dict[str, Any]) -> dict[str, Any]:
    rotated = given["rotary_dim"]
    share = None if rotated is None else rotated / given["head_dim"]
    return rotary_decoder_fields(given, share if share is not None else 1.0) | dict(
        wide_qk_norm=True,
        experts=ExpertsConfig(
            num=given["num_local_experts"],
            size=given["intermediate_size"],
            per_token=given["num_experts_per_tok"],
            scores="sigmoid",
            has_correction=True,
        ),
        expert_names=replace(MIXTRAL_NAMES, correction="e_score_correction_bias"),
    )


_SEVERAL_SHARED = ExpertNames(shared="shared_experts.")
_READERS: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = MappingProxyType(
    {
        "mixtral": _mixtral,
        "qwen2_moe": _qwen2,
        "qwen3_moe": _qwen3,
        "qwen3_vl_moe_text": _qwen3_vl,
        "olmoe": _olmoe,
        "glm4_moe": _glm,
        "dots1": _dots,
        "ernie4_5_moe": _ernie,
        "minimax_m2": _minimax,
    }
)


def qwen_experts(given: Mapping[str, Any]) -> ExpertsConfig:
    """Return the experts of Qwen's models, without shared ones."""
    return ExpertsConfig(
        num=given["num_experts"],
        size=given["moe_intermediate_size"],
        per_token=given["num_experts_per_tok"],
        normalises_gates=bool(given["norm_topk_prob"]),
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


MIXTRAL_NAMES = ExpertNames(mlp="block_sparse_moe.", gate="w1", up="w3", down="w2")


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
    order = neighbours(config.head_dim, config.head_dim) if config.rotates_neighbours else None
    return {
        **attention_weights(config, order=order),
        **mlp_weights(),
        **expert_weights(config, LAYER, config.expert_names),
        "lm_head_bias": Weight.of("lm_head.bias", "v"),
    }


FAMILY = Family(
    fields=_FIELDS,
    config=MoEConfig,
    decoder=MoEDecoder,
    weights=_weights,
    predicts_several=True,
    ignored=r".*\.rotary_emb\.inv_freq|(?:model\.)?mtp.*",
)
