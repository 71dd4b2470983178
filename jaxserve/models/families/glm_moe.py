"""GLM-4.5, dots.llm1, ERNIE 4.5 and MiniMax-M2: routers with a correction instead of a loss.

A correction of each expert balances the load: it counts for the choice, and not for the gates
(arXiv:2408.15664).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Self, final

from jaxserve.models.config import DecoderConfig, Fields
from jaxserve.models.decoder import Decoder
from jaxserve.models.experts import ExpertNames, expert_weights
from jaxserve.models.families.moe import MIXTRAL_NAMES
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
from jaxserve.models.weights import Weight, neighbours

_ROUTED = ROTARY_FIELDS | dict(
    intermediate_size=10944,
    attention_bias=False,
    moe_intermediate_size=1408,
    routed_scaling_factor=1.0,
    n_group=1,
    topk_group=1,
)
_FIELDS = {
    "glm4_moe": Fields.of(
        _ROUTED,
        vocab_size=151552,
        num_hidden_layers=46,
        num_attention_heads=96,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.5,
        use_qk_norm=False,
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_routed_experts=128,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        aliases={"num_local_experts": "n_routed_experts"},
    ),
    "dots1": Fields.of(
        _ROUTED,
        vocab_size=152064,
        hidden_size=4608,
        num_hidden_layers=62,
        num_key_value_heads=32,
        sliding_window=4096,
        max_window_layers=62,
        layer_types=None,
        num_experts_per_tok=None,
        n_shared_experts=None,
        n_routed_experts=None,
        first_k_dense_replace=0,
        norm_topk_prob=False,
        nullable=("num_key_value_heads", "sliding_window", "norm_topk_prob"),
        aliases={"num_local_experts": "n_routed_experts"},
    ),
    "ernie4_5_moe": Fields.of(
        ROTARY_FIELDS,
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
        nullable=("num_key_value_heads", "use_bias"),
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    ),
    "minimax_m2": Fields.of(
        ROTARY_FIELDS,
        vocab_size=200064,
        hidden_size=3072,
        intermediate_size=1536,
        num_hidden_layers=62,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=196608,
        rope_theta=5e6,
        partial_rotary_factor=None,
        rotary_dim=None,
        num_local_experts=256,
        num_experts_per_tok=8,
        aliases={"num_experts": "num_local_experts"},
    ),
}


@final
@dataclass(frozen=True, kw_only=True)
class GlmMoEConfig(DecoderConfig):
    """GLM-4.5 (arXiv:2508.06471), dots.llm1 (arXiv:2506.05767), ERNIE 4.5 and MiniMax-M2."""

    rope: Rope | None = Rope()
    expert_names: ExpertNames
    rotates_neighbours: bool = False  # whether checkpoints rotate neighbouring dimensions

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        kind = given["model_type"]
        given = _FIELDS[kind].read(given)
        return cls(**_READERS[kind](given))


def _glm(given: dict[str, Any]) -> dict[str, Any]:
    return rotary_decoder_fields(given, given["partial_rotary_factor"]) | dict(
        o_bias=False, qk_norm=bool(given["use_qk_norm"]), **grouped_experts(given)
    )


def _dots(given: dict[str, Any]) -> dict[str, Any]:
    return rotary_decoder_fields(given) | dict(qk_norm=True, **grouped_experts(given))


def grouped_experts(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields about experts of models whose routers are DeepSeek-V3's."""
    num_layers = given["num_hidden_layers"]
    first = given["first_k_dense_replace"] if given["n_routed_experts"] else num_layers
    return dict(
        experts=ExpertsConfig.from_hf(
            given,
            per_token=given["num_experts_per_tok"] or 0,
            scores="sigmoid",
            has_correction=True,
            shared_size=given["moe_intermediate_size"] * (given["n_shared_experts"] or 0) or None,
        ),
        mlp_kinds=tuple("dense" if i < first else "experts" for i in range(num_layers)),
        expert_names=_SEVERAL_SHARED,
    )


def _ernie(given: dict[str, Any]) -> dict[str, Any]:
    bias, size = bool(given["use_bias"]), given["moe_intermediate_size"]
    num_layers, end = given["num_hidden_layers"], given["moe_layer_end_index"]
    layers = range(given["moe_layer_start_index"], num_layers if end == -1 else end + 1)
    sparse = {i for i in layers if (i + 1) % given["moe_layer_interval"] == 0}
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
        mlp_kinds=tuple("experts" if i in sparse else "dense" for i in range(num_layers)),
        expert_names=replace(
            _SEVERAL_SHARED,
            correction="moe_statics.e_score_correction_bias",
            correction_layout="() n",
        ),
        rotates_neighbours=True,
    )


def _minimax(given: dict[str, Any]) -> dict[str, Any]:
    share = given["partial_rotary_factor"]
    if share is None:
        share = 1.0 if given["rotary_dim"] is None else given["rotary_dim"] / given["head_dim"]
    return rotary_decoder_fields(given, share) | dict(
        wide_qk_norm=True,
        experts=ExpertsConfig.from_hf(given, scores="sigmoid", has_correction=True),
        expert_names=replace(MIXTRAL_NAMES, correction="e_score_correction_bias"),
    )


_SEVERAL_SHARED = ExpertNames(shared="shared_experts.")
_READERS: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = MappingProxyType(
    {"glm4_moe": _glm, "dots1": _dots, "ernie4_5_moe": _ernie, "minimax_m2": _minimax}
)


def _weights(config: GlmMoEConfig) -> dict[str, Weight]:
    order = neighbours(config.head_dim, config.head_dim) if config.rotates_neighbours else None
    return {
        **attention_weights(config, order=order),
        **mlp_weights(),
        **expert_weights(config, LAYER, config.expert_names),
        "lm_head_bias": Weight.of("lm_head.bias", "v"),
    }


FAMILY = Family(
    fields=_FIELDS,
    config=GlmMoEConfig,
    decoder=Decoder,
    weights=_weights,
    predicts_several=True,
    ignored=r".*\.rotary_emb\.inv_freq|(?:model\.)?mtp.*",
)
