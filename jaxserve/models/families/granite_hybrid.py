"""Granite 4: layers of Mamba-2 and of attention, with an MLP or a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, cast, final

from jaxtyping import Array, Float

from jaxserve.models.config import DecoderConfig, Fields, LayerKind, check_is, kinds_by_name
from jaxserve.models.context import LayerContext
from jaxserve.models.experts import MixtureOfExperts
from jaxserve.models.families.bamba import MAMBA_FIELDS, NULLABLE_MAMBA_FIELDS, mamba_sizes
from jaxserve.models.families.granite import FACTORS, Granite, GraniteFactors, factor_fields
from jaxserve.models.families.granite_moe import GraniteMoEBlock, mlp_weights
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, GatedMLP, RecurrentBlock, scaled
from jaxserve.models.llama_form import (
    LAYER,
    ROTARY_FIELDS,
    attention_weights,
    rotary_decoder_fields,
)
from jaxserve.models.mamba import Mamba2Mixer, mixer_weights
from jaxserve.models.norms import RMSNorm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.rope import Rope
from jaxserve.models.routing import ExpertsConfig
from jaxserve.models.weights import Weight

_FIELDS = {
    "granitemoehybrid": Fields.of(
        ROTARY_FIELDS,
        FACTORS,
        MAMBA_FIELDS,
        shared_intermediate_size=1024,
        attention_bias=False,
        position_embedding_type=None,
        layer_types=None,
        num_local_experts=8,
        num_experts_per_tok=2,
        nullable=NULLABLE_MAMBA_FIELDS,
        aliases={"layers_block_type": "layer_types"},
    )
}


@final
@dataclass(frozen=True, kw_only=True)
class GraniteHybridConfig(GraniteFactors):
    """Granite 4 (IBM 2025)."""

    rope: Rope | None = None

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS["granitemoehybrid"].read(given)
        check_is(given, "hidden_act", ("silu", "swish"))
        check_is(given, "position_embedding_type", (None, "nope", "rope"))
        kinds = given.pop("layer_types") or ["linear_attention"] * given["num_hidden_layers"]
        by_name: Mapping[str, LayerKind] = {
            "linear_attention": "recurrent",
            "full_attention": "attention",
        }
        fields = rotary_decoder_fields(given)
        if given["position_embedding_type"] != "rope":
            fields["rope"] = None
        bias = bool(given["attention_bias"])
        num_experts, shared = given["num_local_experts"], given["shared_intermediate_size"]
        experts = ExpertsConfig(
            num=num_experts,
            size=fields["intermediate_size"],
            per_token=given["num_experts_per_tok"],
            shared_size=shared,
            layout="out_in",
        )
        return cls(
            **fields | {"intermediate_size": shared},
            **factor_fields(given),
            qkv_bias=bias,
            o_bias=bias,
            layer_kinds=kinds_by_name(kinds, by_name, fields["num_layers"]),
            recurrence=mamba_sizes(given),
            experts=experts if num_experts else None,
        )


class GraniteMambaBlock(RecurrentBlock):
    """x + s * mixer(norm(x)), then x + s * mlp(norm(x)), with s = `residual_scale`."""

    norm_class = RMSNorm
    mlp_class = GatedMLP
    mixer_class = Mamba2Mixer

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        super().__init__(config, new)
        self.residual_scale = cast(GraniteFactors, config).residual_scale

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        x = x + scaled(self.mixer(self.mixer_norm(x), context), self.residual_scale)
        return x + scaled(self.mlp(x, context, norm=self.mlp_norm), self.residual_scale)


@final
class ExpertsMambaBlock(GraniteMambaBlock):
    mlp_class = MixtureOfExperts


@final
class GraniteHybrid(Granite):
    recurrent_block_class = GraniteMambaBlock

    def _block_class(self, layer: int) -> type[Block]:
        if self.config.experts is None:
            return super()._block_class(layer)
        is_attention = self.config.layer_kinds[layer] == "attention"
        return GraniteMoEBlock if is_attention else ExpertsMambaBlock


def _weights(config: GraniteHybridConfig) -> dict[str, Weight]:
    return {
        **attention_weights(config),
        **mixer_weights("blocks.mixer.", LAYER + "mamba."),
        **mlp_weights(config),
        "blocks.mixer_norm.scale": Weight.of(LAYER + "input_layernorm.weight"),
    }


FAMILY = Family(fields=_FIELDS, config=GraniteHybridConfig, decoder=GraniteHybrid, weights=_weights)
