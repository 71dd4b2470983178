"""DeepSeek V2 and V3, GLM-4.7-Flash: latent attention, whose keys and values are cached in full."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, final

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig, Fields, Latents, MLPKind, check_is
from jaxserve.models.decoder import Decoder
from jaxserve.models.experts import ExpertNames, expert_weights
from jaxserve.models.families.glm_moe import grouped_experts
from jaxserve.models.family import Family
from jaxserve.models.latent_attention import LatentAttention, latent_weights
from jaxserve.models.layers import Block
from jaxserve.models.llama_form import (
    LAYER,
    ROTARY_FIELDS,
    attention_weights,
    mlp_weights,
    rotary_decoder_fields,
)
from jaxserve.models.rope import Rope, rope_fields
from jaxserve.models.weights import Weight

_LATENT = {name: value for name, value in ROTARY_FIELDS.items() if name != "head_dim"} | dict(
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    attention_bias=False,
)
_FIELDS = {
    "deepseek_v2": Fields.of(
        _LATENT,
        vocab_size=102400,
        mlp_bias=False,
        q_lora_rank=1536,
        moe_intermediate_size=1407,
        num_experts_per_tok=None,
        n_shared_experts=2,
        n_routed_experts=64,
        routed_scaling_factor=1.0,
        n_group=None,
        topk_group=None,
        topk_method="greedy",
        first_k_dense_replace=0,
        nullable=("q_lora_rank",),
        aliases={"num_experts": "n_routed_experts"},
    ),
    "deepseek_v3": Fields.of(
        _LATENT,
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        num_hidden_layers=61,
        num_attention_heads=128,
        num_key_value_heads=128,
        max_position_embeddings=4096,
        q_lora_rank=1536,
        rope_interleave=True,
        moe_intermediate_size=2048,
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_routed_experts=256,
        routed_scaling_factor=2.5,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=3,
        norm_topk_prob=True,
        nullable=("q_lora_rank", "num_key_value_heads", "rope_interleave", "norm_topk_prob"),
        aliases={"num_local_experts": "n_routed_experts"},
    ),
    "glm4_moe_lite": Fields.of(
        _LATENT,
        vocab_size=154880,
        hidden_size=2048,
        intermediate_size=10240,
        num_hidden_layers=47,
        num_attention_heads=20,
        num_key_value_heads=20,
        max_position_embeddings=202752,
        rms_norm_eps=1e-5,
        q_lora_rank=768,
        qk_nope_head_dim=192,
        v_head_dim=256,
        rope_interleave=True,
        moe_intermediate_size=1536,
        num_experts_per_tok=4,
        n_shared_experts=1,
        n_routed_experts=64,
        routed_scaling_factor=1.8,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        mlp_layer_types=None,
        nullable=("q_lora_rank",),
        aliases={"num_local_experts": "n_routed_experts"},
    ),
}


@final
@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(DecoderConfig):
    """DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437)."""

    rope: Rope | None = Rope()
    rotates_neighbours: bool = True  # whether checkpoints rotate neighbouring dimensions

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        kind = given["model_type"]
        given = _FIELDS[kind].read(given)
        rotated, heads = given["qk_rope_head_dim"], given["num_attention_heads"]
        head_dim = rotated + given["qk_nope_head_dim"]
        if given["v_head_dim"] > head_dim:
            raise UnsupportedModelError(
                f"v_head_dim={given['v_head_dim']} is more than the {head_dim} dimensions of a "
                "key, which is not supported"
            )
        check_is(given, "num_key_value_heads", (None, heads))
        sizes = {**given, "head_dim": rotated, "num_key_value_heads": heads}
        fields = rotary_decoder_fields(sizes)
        fields |= dict(
            head_dim=head_dim,
            rope=replace(fields["rope"], dim=rotated),
            latents=Latents(
                query_rank=given["q_lora_rank"],
                latent_rank=given["kv_lora_rank"],
                value_dim=given["v_head_dim"],
            ),
            attention_scale=head_dim**-0.5 * _magnitude(rope_fields(given)) ** 2,
            rotates_neighbours=bool(given.get("rope_interleave", True)),
        )
        if kind == "deepseek_v2":
            return cls(**fields, **_second_version(given))
        experts = grouped_experts({"first_k_dense_replace": 1, **given})
        if given.get("mlp_layer_types") is not None:
            names: dict[str, MLPKind] = {"dense": "dense", "sparse": "experts"}
            if not set(given["mlp_layer_types"]) <= names.keys():
                raise UnsupportedModelError(
                    f"mlp_layer_types={given['mlp_layer_types']} is not supported; give 'dense' or "
                    "'sparse' for each layer"
                )
            experts["mlp_kinds"] = tuple(names[each] for each in given["mlp_layer_types"])
        experts.pop("expert_names")
        return cls(**fields, **experts)


def _second_version(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields about experts of DeepSeek-V2, whose gates are the softmax's."""
    check_is(given, "topk_method", ("greedy", "group_limited_greedy"))
    has_groups = given["topk_method"] == "group_limited_greedy"
    found = grouped_experts({**given, "norm_topk_prob": False, "n_group": 1, "topk_group": 1})
    experts = replace(
        found["experts"],
        scores="softmax",
        has_correction=False,
        group_score="best",
        num_groups=(given["n_group"] or 1) if has_groups else 1,
        num_chosen_groups=(given["topk_group"] or 1) if has_groups else 1,
    )
    return {"experts": experts, "mlp_kinds": found["mlp_kinds"]}


def _magnitude(rotation: Mapping[str, Any]) -> float:
    """Return the factor of queries and of keys that yarn's mscale_all_dim stands for."""
    scale = rotation.get("mscale_all_dim")
    if rotation.get("rope_type", rotation.get("type", "default")) == "default" or not scale:
        return 1.0
    factor = rotation["factor"]
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


@final
class DeepseekBlock(Block):
    attention_class = LatentAttention


@final
class Deepseek(Decoder):
    block_class = DeepseekBlock


def _weights(config: DeepseekConfig) -> dict[str, Weight]:
    return {
        **{
            path: weight
            for path, weight in attention_weights(config).items()
            if not path.startswith("blocks.attention.")
        },
        **mlp_weights(),
        **expert_weights(config, LAYER, ExpertNames(shared="shared_experts.")),
        **latent_weights(
            config, LAYER + "self_attn.", rotates_neighbours=config.rotates_neighbours
        ),
    }


FAMILY = Family(
    fields=_FIELDS, config=DeepseekConfig, decoder=Deepseek, weights=_weights, predicts_several=True
)
