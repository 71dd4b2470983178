"""HunYuan 1, dense and with experts: Llama with norms of heads after the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig, Fields, check_is
from jaxserve.models.experts import ExpertNames, expert_weights
from jaxserve.models.families.moe import MoEDecoder
from jaxserve.models.family import Family
from jaxserve.models.llama_form import (
    LAYER,
    ROTARY_FIELDS,
    attention_weights,
    mlp_weights,
    rotary_decoder_fields,
)
from jaxserve.models.rope import Rope, rope_fields
from jaxserve.models.routing import ExpertsConfig
from jaxserve.models.weights import Weight

_DENSE = ROTARY_FIELDS | dict(vocab_size=290943, rms_norm_eps=1e-5, attention_bias=False)
_FIELDS = {
    "hunyuan_v1_dense": Fields(_DENSE, pad_token_id=0),
    "hunyuan_v1_moe": Fields.of(
        _DENSE,
        num_experts=1,
        moe_topk=1,
        aliases={"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
        pad_token_id=0,
    ),
}


@final
@dataclass(frozen=True, kw_only=True)
class HunYuanConfig(DecoderConfig):
    """Tencent 2025, and Hunyuan-Large before (arXiv:2411.02265)."""

    rope: Rope | None = Rope()
    qk_norm: bool = True
    rotates_before_norm: bool = True

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS[given["model_type"]].read(given)
        check_is(given, "hidden_act", ("silu", "swish"))
        fields = rotary_decoder_fields(given | {"rope_scaling": None} | _rotation(given))
        bias = bool(given["attention_bias"])
        experts = None
        if given["model_type"] == "hunyuan_v1_moe":
            experts = ExpertsConfig(
                num=given["num_experts"],
                size=given["intermediate_size"],
                per_token=_of_all_layers(given, "moe_topk"),
                shared_size=given["intermediate_size"],
            )
        return cls(**fields, qkv_bias=bias, o_bias=bias, experts=experts)


def _rotation(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotation's parameters: with `alpha`, a larger base, whatever their kind says.

    Published models call it "dynamic", and it does not depend on the length of a sequence.
    """
    rope = rope_fields(given)
    if rope.get("rope_type", rope.get("type")) == "dynamic" and rope.get("alpha"):
        dim = given["head_dim"] or given["hidden_size"] // given["num_attention_heads"]
        theta = rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2))
        rope = {"rope_type": "default", "rope_theta": theta}
    return {"rope_parameters": rope}


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


def _weights(config: HunYuanConfig) -> dict[str, Weight]:
    attention, path = LAYER + "self_attn.", "blocks.attention."
    names = ExpertNames(router="gate.wg.weight", shared="shared_mlp.")
    return {
        **attention_weights(config),
        f"{path}q_norm.scale": Weight.of(attention + "query_layernorm.weight", "d"),
        f"{path}k_norm.scale": Weight.of(attention + "key_layernorm.weight", "d"),
        **mlp_weights(),
        **expert_weights(config, LAYER, names),
    }


FAMILY = Family(fields=_FIELDS, config=HunYuanConfig, decoder=MoEDecoder, weights=_weights)
