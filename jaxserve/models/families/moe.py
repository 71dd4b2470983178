"""Llama's layers with a mixture of experts instead of the MLP in all or some.

Mixtral, Qwen2-MoE, Qwen3-MoE and the text of its VL model, OLMoE; gpt-oss, with biases, clamped
gates and sinks of attention; Phi-3.5-MoE, with layer norms and a router that chooses two experts
one after the other; HunYuan 1, dense and with experts, with norms of heads after the rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Self, final

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig, Fields, MLPKind, check_is, kinds_in_turn
from jaxserve.models.decoder import Decoder
from jaxserve.models.experts import ExpertNames, expert_weights
from jaxserve.models.family import Family
from jaxserve.models.llama_form import (
    LAYER,
    ROTARY_FIELDS,
    attention_weights,
    mlp_weights,
    rotary_decoder_fields,
)
from jaxserve.models.rope import Rope, rope_fields
from jaxserve.models.routing import ClampedGate, ExpertsConfig
from jaxserve.models.weights import Weight, layer_norm

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
_HUNYUAN = ROTARY_FIELDS | dict(vocab_size=290943, rms_norm_eps=1e-5, attention_bias=False)
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
    ),
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
    ),
    "hunyuan_v1_dense": Fields(_HUNYUAN, pad_token_id=0),
    "hunyuan_v1_moe": Fields.of(
        _HUNYUAN,
        num_experts=1,
        moe_topk=1,
        aliases={"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
        pad_token_id=0,
    ),
}
# The rotation of a gpt-oss whose config.json has none.
_GPT_OSS_ROTATION = dict(
    rope_type="yarn",
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=4096,
)


@final
@dataclass(frozen=True, kw_only=True)
class MoEConfig(DecoderConfig):
    """Mixtral (arXiv:2401.04088), Qwen2 and 3 (2407.10671, 2505.09388), OLMoE (2409.02060).

    gpt-oss-20b and 120b (arXiv:2508.10925); Phi-3.5-MoE (arXiv:2404.14219), whose router is GRIN's
    (arXiv:2409.12136); HunYuan (Tencent 2025, and Hunyuan-Large before, arXiv:2411.02265).

    Attributes:
      qk_norm_names: the names of norms of queries and keys in checkpoints.
    """

    rope: Rope | None = Rope()
    expert_names: ExpertNames = ExpertNames()
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        kind = given["model_type"]
        given = _FIELDS[kind].read(given)
        return cls(**_READERS[kind](given))


def _mixtral(given: dict[str, Any]) -> dict[str, Any]:
    experts = ExpertsConfig.from_hf(given)
    return rotary_decoder_fields(given) | dict(experts=experts, expert_names=MIXTRAL_NAMES)


def _qwen2(given: dict[str, Any]) -> dict[str, Any]:
    if given["layer_types"] is None:
        num_layers, last = given["num_hidden_layers"], given["max_window_layers"]
        given["layer_types"] = [
            "sliding_attention" if i % 2 == 0 and i < last else "full_attention"
            for i in range(num_layers)
        ]
    size = given["shared_expert_intermediate_size"]
    experts = ExpertsConfig.from_hf(given, shared_size=size, has_shared_gate=True)
    return rotary_decoder_fields(given) | dict(
        qkv_bias=bool(given["qkv_bias"]), experts=experts, mlp_kinds=sparse_layers(given)
    )


def _qwen3(given: dict[str, Any]) -> dict[str, Any]:
    return rotary_decoder_fields(given) | dict(
        qk_norm=True, experts=ExpertsConfig.from_hf(given), mlp_kinds=sparse_layers(given)
    )


def _qwen3_vl(given: dict[str, Any]) -> dict[str, Any]:
    fields = _qwen3({**given, "norm_topk_prob": True})
    return fields | {"experts": replace(fields["experts"], layout="in_out")}


def _olmoe(given: dict[str, Any]) -> dict[str, Any]:
    return rotary_decoder_fields(given) | dict(
        wide_qk_norm=True, qkv_clip=given["clip_qkv"], experts=ExpertsConfig.from_hf(given)
    )


def _gpt_oss(given: dict[str, Any]) -> dict[str, Any]:
    if given["rope_parameters"] is None:
        given["rope_parameters"] = _GPT_OSS_ROTATION
    if given["layer_types"] is None:
        given["layer_types"] = kinds_in_turn(given["num_hidden_layers"], 2)
    experts = ExpertsConfig.from_hf(
        given,
        has_router_bias=True,
        has_bias=True,
        clamped_gate=ClampedGate(slope=given["swiglu_alpha"], limit=given["swiglu_limit"]),
        layout="in_out",
    )
    names = ExpertNames(router="router.weight", router_bias="router.bias", both="(m u)")
    return rotary_decoder_fields(given) | dict(has_sinks=True, experts=experts, expert_names=names)


def _phimoe(given: dict[str, Any]) -> dict[str, Any]:
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
    return rotary_decoder_fields(given) | dict(
        norm_kind="layer",
        lm_head_bias=bool(given["lm_head_bias"]),
        experts=ExpertsConfig.from_hf(given, near_best=2.0 * given["router_jitter_noise"]),
        expert_names=MIXTRAL_NAMES,
    )


def _hunyuan(given: dict[str, Any]) -> dict[str, Any]:
    """Return HunYuan's fields: with `alpha`, a larger base of the rotation, whatever its kind says.

    Published models call it "dynamic", and it does not depend on the length of a sequence.
    """
    rope = rope_fields(given)
    if rope.get("rope_type", rope.get("type")) == "dynamic" and rope.get("alpha"):
        dim = given["head_dim"] or given["hidden_size"] // given["num_attention_heads"]
        theta = rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2))
        rope = {"rope_type": "default", "rope_theta": theta}
    fields = rotary_decoder_fields(given | {"rope_scaling": None, "rope_parameters": rope})
    if given["model_type"] == "hunyuan_v1_moe":
        fields["experts"] = ExpertsConfig.from_hf(
            given,
            per_token=_of_all_layers(given, "moe_topk"),
            shared_size=given["intermediate_size"],
        )
    return fields | dict(
        qk_norm=True,
        rotates_before_norm=True,
        qk_norm_names=("query_layernorm", "key_layernorm"),
        expert_names=ExpertNames(router="gate.wg.weight", shared="shared_mlp."),
    )


def _of_all_layers(given: Mapping[str, Any], name: str) -> int:
    """Return a field with one value, or with a list of the value of each layer."""
    value = given[name]
    values = {value} if isinstance(value, int) else set(value)
    if len(values) != 1:
        raise UnsupportedModelError(
            f"{name}={value} is not supported for {given['model_type']!r}; give one value for all "
            "layers"
        )
    return values.pop()


_READERS: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = MappingProxyType(
    {
        "mixtral": _mixtral,
        "qwen2_moe": _qwen2,
        "qwen3_moe": _qwen3,
        "qwen3_vl_moe_text": _qwen3_vl,
        "olmoe": _olmoe,
        "gpt_oss": _gpt_oss,
        "phimoe": _phimoe,
        **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), _hunyuan),
    }
)


def sparse_layers(given: Mapping[str, Any]) -> tuple[MLPKind, ...]:
    """Return the kind of each layer's MLP, by Qwen's fields."""
    dense, step = given["mlp_only_layers"] or (), given["decoder_sparse_step"]
    layers = range(given["num_hidden_layers"] if given["num_experts"] > 0 else 0)
    sparse = {i for i in layers if i not in dense and (i + 1) % step == 0}
    return tuple("experts" if i in sparse else "dense" for i in range(given["num_hidden_layers"]))


MIXTRAL_NAMES = ExpertNames(mlp="block_sparse_moe.", gate="w1", up="w3", down="w2")


def _weights(config: MoEConfig) -> dict[str, Weight]:
    weights = attention_weights(config) | mlp_weights()
    weights |= expert_weights(config, LAYER, config.expert_names)
    if config.qk_norm:
        for letter, name in zip("qk", config.qk_norm_names, strict=True):
            path = f"blocks.attention.{letter}_norm.scale"
            weights[path] = Weight.of(f"{LAYER}self_attn.{name}.weight", "d")
    if config.norm_kind == "layer":
        weights |= layer_norm("norm", "model.norm")
        weights |= layer_norm("blocks.attention_norm", LAYER + "input_layernorm")
        weights |= layer_norm("blocks.mlp_norm", LAYER + "post_attention_layernorm")
        weights["lm_head_bias"] = Weight.of("lm_head.bias", "v")
    return weights


FAMILY = Family(fields=_FIELDS, config=MoEConfig, decoder=Decoder, weights=_weights)
