"""Granite 3 and 4: Llama's layers with factors of embedding, residuals and logits.

The dense models, those with a mixture of experts instead of the MLP, and Granite 4, whose layers
are of Mamba-2 or of attention, with an MLP or a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig, Fields, LayerKind, check_is, kinds_by_name
from jaxserve.models.decoder import Decoder
from jaxserve.models.experts import ExpertNames, expert_weights
from jaxserve.models.families.bamba import MAMBA_FIELDS, NULLABLE_MAMBA_FIELDS, mamba_sizes
from jaxserve.models.family import Family
from jaxserve.models.llama_form import (
    LAYER,
    ROTARY_FIELDS,
    attention_weights,
    mlp_weights,
    rotary_decoder_fields,
)
from jaxserve.models.mamba import mixer_weights
from jaxserve.models.rope import Rope
from jaxserve.models.routing import ExpertsConfig
from jaxserve.models.weights import Weight

_SHARED = ROTARY_FIELDS | dict(
    attention_bias=False,
    embedding_multiplier=1.0,
    logits_scaling=1.0,
    residual_multiplier=1.0,
    attention_multiplier=1.0,
)
_EXPERTS = dict(num_local_experts=8, num_experts_per_tok=2)
_FIELDS = {
    "granite": Fields.of(_SHARED, mlp_bias=False),
    "granitemoe": Fields.of(_SHARED, _EXPERTS),
    "granitemoeshared": Fields.of(_SHARED, _EXPERTS, shared_intermediate_size=0),
    "granitemoehybrid": Fields.of(
        _SHARED,
        _EXPERTS,
        MAMBA_FIELDS,
        shared_intermediate_size=1024,
        position_embedding_type=None,
        layer_types=None,
        nullable=NULLABLE_MAMBA_FIELDS,
        aliases={"layers_block_type": "layer_types"},
    ),
}


@final
@dataclass(frozen=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """Granite 3 (IBM 2024) and 4 (IBM 2025).

    Their factors are those that muP gives to a model (Yang et al., arXiv:2203.03466).
    """

    rope: Rope | None = Rope()

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS[given["model_type"]].read(given)
        if not given["logits_scaling"]:
            raise UnsupportedModelError(
                "logits_scaling=0 is not supported; give the number that logits are divided by"
            )
        fields = rotary_decoder_fields(given)
        fields |= dict(
            embedding_scale=float(given["embedding_multiplier"]),
            residual_scale=float(given["residual_multiplier"]),
            attention_scale=float(given["attention_multiplier"]),
            logits_scale=1.0 / given["logits_scaling"],
        )
        if given.get("num_local_experts"):
            shared = given.get("shared_intermediate_size") or None
            fields["experts"] = ExpertsConfig.from_hf(given, shared_size=shared, layout="out_in")
        if given["model_type"] == "granitemoehybrid":
            fields |= _hybrid(given)
        return cls(**fields)


def _hybrid(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Granite 4, whose dense MLP has the size of the shared one."""
    check_is(given, "position_embedding_type", (None, "nope", "rope"))
    kinds = given["layer_types"] or ["linear_attention"] * given["num_hidden_layers"]
    by_name: Mapping[str, LayerKind] = {
        "linear_attention": "recurrent",
        "full_attention": "attention",
    }
    fields: dict[str, Any] = dict(
        intermediate_size=given["shared_intermediate_size"],
        layer_kinds=kinds_by_name(kinds, by_name, given["num_hidden_layers"]),
        recurrence=mamba_sizes(given),
    )
    return fields if given["position_embedding_type"] == "rope" else fields | {"rope": None}


_NAMES = ExpertNames(
    mlp="block_sparse_moe.",
    router="router.layer.weight",
    gate_up="input_linear.weight",
    down_all="output_linear.weight",
)


def _weights(config: GraniteConfig) -> dict[str, Weight]:
    weights = attention_weights(config)
    if config.experts is None and config.recurrence is None:
        return weights | mlp_weights()
    # An MLP beside the experts, or instead of them.
    path = "blocks.mlp." if config.experts is None else "blocks.mlp.shared."
    shared = LAYER + "shared_mlp."
    return {
        **weights,
        **mixer_weights("blocks.mixer.", LAYER + "mamba."),
        "blocks.mixer_norm.scale": Weight.of(LAYER + "input_layernorm.weight"),
        **expert_weights(config, LAYER, _NAMES),
        f"{path}gate_up": Weight.of(f"{shared}input_linear.weight", "e u m", "(u m) e"),
        f"{path}down": Weight.of(f"{shared}output_linear.weight", "m e", "e m"),
    }


FAMILY = Family(fields=_FIELDS, config=GraniteConfig, decoder=Decoder, weights=_weights)
