"""DeepSeek V2 and V3, GLM-4.7-Flash: latent attention, whose keys and values are cached in full."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, cast, final

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig, Fields, MLPKind, check_is
from jaxserve.models.context import LayerContext
from jaxserve.models.decoder import Decoder
from jaxserve.models.experts import ExpertNames, MixtureOfExperts, expert_weights
from jaxserve.models.families.llama import (
    LAYER,
    ROTARY_FIELDS,
    attention_weights,
    mlp_weights,
    rotary_decoder_fields,
)
from jaxserve.models.families.moe import grouped_experts
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, GatedMLP
from jaxserve.models.linear import Linear, SumsRows
from jaxserve.models.norms import Norm, RMSNorm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.projection import normed, with_residual
from jaxserve.models.rope import Rope, rope_fields
from jaxserve.models.weights import Tensor, Weight, neighbours

_LATENT = {name: value for name, value in ROTARY_FIELDS.items() if name != "head_dim"} | dict(
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    attention_bias=False,
)
_FIELDS = {
    "deepseek_v2": Fields(
        _LATENT
        | dict(
            vocab_size=102400,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_key_value_heads=None,
            max_position_embeddings=2048,
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
        ),
        nullable=("q_lora_rank",),
        aliases={"num_experts": "n_routed_experts"},
    ),
    "deepseek_v3": Fields(
        _LATENT
        | dict(
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
        ),
        nullable=("q_lora_rank", "num_key_value_heads", "rope_interleave", "norm_topk_prob"),
        aliases={"num_local_experts": "n_routed_experts"},
    ),
    "glm4_moe_lite": Fields(
        _LATENT
        | dict(
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
        ),
        nullable=("q_lora_rank",),
        aliases={"num_local_experts": "n_routed_experts"},
    ),
}


@final
@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(DecoderConfig):
    """DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437).

    A head has its rotated dimensions first. Values are padded to the size of keys in the cache.

    Attributes:
      query_rank: the size of a token's queries before they become those of heads; None if they do
        not have one.
      latent_rank: the size of a token's keys and values before they become those of heads.
      value_dim: the size of a value.
      rotates_neighbours: whether checkpoints rotate neighbouring dimensions.
    """

    rope: Rope | None = Rope()
    query_rank: int | None
    latent_rank: int
    value_dim: int
    rotates_neighbours: bool = True

    @property
    def rotated_dim(self) -> int:
        assert self.rope is not None and self.rope.dim is not None
        return self.rope.dim

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        kind = given["model_type"]
        given = _FIELDS[kind].read(given)
        check_is(given, "hidden_act", ("silu", "swish"))
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
        bias = bool(given["attention_bias"])
        fields |= dict(
            head_dim=head_dim,
            rope=replace(fields["rope"], dim=rotated),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bool(given.get("mlp_bias")),
            query_rank=given["q_lora_rank"],
            latent_rank=given["kv_lora_rank"],
            value_dim=given["v_head_dim"],
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
class LatentAttention(SumsRows):
    """Attention whose queries, and whose keys and values, are made from a few dimensions.

    q_a    [embed, query_rank], q_b [query_rank, heads, head_dim]; or wq [embed, heads, head_dim]
    kv_a   [embed, latent_rank + rotated]    the rotated part is of all heads' keys
    kv_b   [latent_rank, heads, head_dim - rotated + value_dim]
    wo     [heads, value_dim, embed]
    q_norm [query_rank], kv_norm [latent_rank], and biases bq_a, bkv_a, bo where the config has them
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        self.config = config = cast(DeepseekConfig, config)
        embed, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
        rank, rotated, has_bias = config.latent_rank, config.rotated_dim, config.qkv_bias
        by_head = ("kv_heads", None)
        # Their epsilon is 1e-6, whatever that of the other norms is.
        small = replace(config, norm_eps=1e-6)
        if config.query_rank is None:
            self.wq = new.weight(("embed", *by_head), (embed, heads, head_dim))
        else:
            self.q_a = new.weight(("embed", None), (embed, config.query_rank))
            self.bq_a = new.zeros((None,), (config.query_rank,)) if has_bias else None
            self.q_norm = RMSNorm(replace(small, hidden_size=config.query_rank), new)
            self.q_b = new.weight((None, *by_head), (config.query_rank, heads, head_dim))
        self.kv_a = new.weight(("embed", None), (embed, rank + rotated))
        self.bkv_a = new.zeros((None,), (rank + rotated,)) if has_bias else None
        self.kv_norm = RMSNorm(replace(small, hidden_size=rank), new)
        width = head_dim - rotated + config.value_dim
        self.kv_b = new.weight((None, *by_head), (rank, heads, width))
        self.wo = new.weight((*by_head, "embed"), (heads, config.value_dim, embed), num_in=2)
        self.bo = new.zeros(("embed",), (embed,)) if config.o_bias else None

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        context: LayerContext,
        *,
        norm: Norm | None = None,
        residual: Float[Array, "tokens embed"] | None = None,
    ) -> Float[Array, "tokens embed"]:
        """Return attention's addition to the residual stream, or with `residual` their sum."""
        config, adapter, kernels = self.config, context.adapter, self.row_kernels
        x = normed(x, norm)

        def times(weight: Any, x: Array, bias: nnx.Param | None = None) -> Array:
            return Linear(weight, bias, row_kernels=kernels)(x, adapter)

        if config.query_rank is None:
            q = times(self.wq, x)
        else:
            q = times(self.q_b, self.q_norm(times(self.q_a, x, self.bq_a)))
        latent, rotated = jnp.split(times(self.kv_a, x, self.bkv_a), (config.latent_rank,), axis=1)
        kv = times(self.kv_b, self.kv_norm(latent))
        k, v = jnp.split(kv, (config.head_dim - config.rotated_dim,), axis=2)
        shared = jnp.broadcast_to(rotated[:, None], (*k.shape[:2], config.rotated_dim))
        k = jnp.concatenate([shared, k], axis=2)
        v = jnp.pad(v, [(0, 0), (0, 0), (0, config.head_dim - config.value_dim)])
        out = context.attend(
            jnp.stack([q, k, v], axis=2), scale=config.attention_scale, soft_cap=None
        )
        return with_residual(residual, times(self.wo, out[..., : config.value_dim], self.bo))


class DeepseekBlock(Block):
    norm_class = RMSNorm
    mlp_class = GatedMLP

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        nnx.Module.__init__(self)  # not `Block`'s, which makes another attention
        self.residual = config.residual
        self.attention_norm = RMSNorm(config, new)
        self.attention: Any = LatentAttention(config, new)
        self.mlp_norm = RMSNorm(config, new)
        self.mlp = self.mlp_class(config, new)


@final
class DeepseekMoEBlock(DeepseekBlock):
    mlp_class = MixtureOfExperts


@final
class Deepseek(Decoder):
    block_class = DeepseekMoEBlock

    def _block_class(self, layer: int) -> type[Block]:
        is_sparse = self.config.mlp_kinds[layer] == "experts"
        return DeepseekMoEBlock if is_sparse else DeepseekBlock


def _weights(config: DeepseekConfig) -> dict[str, Weight]:
    attention, path, rotated = LAYER + "self_attn.", "blocks.attention.", config.rotated_dim
    pairs = list(range(rotated))
    if config.rotates_neighbours:
        pairs = neighbours(rotated, rotated)["d"]
    unrotated, rank = config.head_dim - rotated, config.latent_rank
    of_heads = {"d": [*(unrotated + i for i in pairs), *range(unrotated)]}
    of_latents = {"r": [*range(rank), *(rank + i for i in pairs)]}

    def queries(name: str) -> Weight:
        return Weight("e k d", (Tensor(attention + name, "(k d) e", order=of_heads),))

    shared = {
        name: weight
        for name, weight in attention_weights(config).items()
        if not name.startswith(path)
    }
    return {
        **shared,
        **mlp_weights(),
        **expert_weights(config, LAYER, ExpertNames(shared="shared_experts.")),
        f"{path}wq": queries("q_proj.weight"),
        f"{path}q_a": Weight.of(attention + "q_a_proj.weight", "e r", "r e"),
        f"{path}bq_a": Weight.of(attention + "q_a_proj.bias"),
        f"{path}q_norm.scale": Weight.of(attention + "q_a_layernorm.weight"),
        f"{path}q_b": queries("q_b_proj.weight"),
        f"{path}kv_a": Weight(
            "e r", (Tensor(attention + "kv_a_proj_with_mqa.weight", "r e", order=of_latents),)
        ),
        f"{path}bkv_a": Weight(
            "r", (Tensor(attention + "kv_a_proj_with_mqa.bias", "r", order=of_latents),)
        ),
        f"{path}kv_norm.scale": Weight.of(attention + "kv_a_layernorm.weight"),
        f"{path}kv_b": Weight.of(attention + "kv_b_proj.weight", "e k d", "(k d) e"),
        f"{path}wo": Weight.of(attention + "o_proj.weight", "k d e", "e (k d)"),
        f"{path}bo": Weight.of(attention + "o_proj.bias"),
    }


FAMILY = Family(
    fields=_FIELDS,
    config=DeepseekConfig,
    decoder=Deepseek,
    weights=_weights,
    predicts_several=True,
)
