"""Granite 3 with experts: Granite's layers with a mixture of experts instead of the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.models.config import Fields, check_is
from jaxserve.models.experts import ExpertNames, MixtureOfExperts, expert_weights
from jaxserve.models.families.granite import (
    FACTORS,
    Granite,
    GraniteBlock,
    GraniteFactors,
    factor_fields,
)
from jaxserve.models.family import Family
from jaxserve.models.llama_form import (
    LAYER,
    ROTARY_FIELDS,
    attention_weights,
    rotary_decoder_fields,
)
from jaxserve.models.rope import Rope
from jaxserve.models.routing import ExpertsConfig
from jaxserve.models.weights import Weight

_SIZES = (
    ROTARY_FIELDS | FACTORS | dict(attention_bias=False, num_local_experts=8, num_experts_per_tok=2)
)
_FIELDS = {
    "granitemoe": Fields(_SIZES),
    "granitemoeshared": Fields({**_SIZES, "shared_intermediate_size": 0}),
}


@final
@dataclass(frozen=True, kw_only=True)
class GraniteMoEConfig(GraniteFactors):
    """Granite 3.0 and 3.1 of 1B-A400M and 3B-A800M (IBM 2024), without and with shared experts."""

    rope: Rope | None = Rope()

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS[given["model_type"]].read(given)
        check_is(given, "hidden_act", ("silu", "swish"))
        bias = bool(given["attention_bias"])
        return cls(
            **rotary_decoder_fields(given),
            **factor_fields(given),
            qkv_bias=bias,
            o_bias=bias,
            experts=ExpertsConfig(
                num=given["num_local_experts"],
                size=given["intermediate_size"],
                per_token=given["num_experts_per_tok"],
                shared_size=given.get("shared_intermediate_size") or None,
                layout="out_in",
            ),
        )


@final
class GraniteMoEBlock(GraniteBlock):
    mlp_class = MixtureOfExperts


@final
class GraniteMoE(Granite):
    block_class = GraniteMoEBlock


_NAMES = ExpertNames(
    mlp="block_sparse_moe.",
    router="router.layer.weight",
    gate_up="input_linear.weight",
    down_all="output_linear.weight",
)


def mlp_weights(config: GraniteFactors) -> dict[str, Weight]:
    """Return the weights of experts, and of an MLP beside them or instead of them."""
    shared = LAYER + "shared_mlp."
    path = "blocks.mlp." if config.experts is None else "blocks.mlp.shared."
    return {
        **expert_weights(config, LAYER, _NAMES),
        f"{path}gate_up": Weight.of(f"{shared}input_linear.weight", "e u m", "(u m) e"),
        f"{path}down": Weight.of(f"{shared}output_linear.weight", "m e", "e m"),
    }


FAMILY = Family(
    fields=_FIELDS,
    config=GraniteMoEConfig,
    decoder=GraniteMoE,
    weights=lambda config: attention_weights(config) | mlp_weights(config),
)
