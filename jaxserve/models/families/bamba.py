"""Bamba: layers of Mamba-2 and layers of attention, each with an MLP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig, Fields, LayerKind
from jaxserve.models.decoder import Decoder
from jaxserve.models.family import Family
from jaxserve.models.llama_form import (
    LAYER,
    ROTARY_FIELDS,
    attention_weights,
    mlp_weights,
    rotary_decoder_fields,
)
from jaxserve.models.mamba import Mamba2Sizes, mixer_weights, step_limits
from jaxserve.models.rope import Rope
from jaxserve.models.weights import Weight

# Fields that Bamba and its relatives share.
MAMBA_FIELDS = dict(
    mamba_expand=2,
    mamba_n_heads=128,
    mamba_d_head="auto",
    mamba_n_groups=1,
    mamba_d_state=256,
    mamba_d_conv=4,
    mamba_conv_bias=True,
    mamba_proj_bias=False,
    time_step_limit=(0.0, math.inf),
)
NULLABLE_MAMBA_FIELDS = ("mamba_conv_bias", "mamba_proj_bias", "time_step_limit")
_FIELDS = {
    "bamba": Fields.of(
        ROTARY_FIELDS,
        MAMBA_FIELDS,
        vocab_size=128000,
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=262144,
        rms_norm_eps=1e-5,
        attention_bias=False,
        mlp_bias=False,
        attn_layer_indices=None,
        nullable=("num_key_value_heads", *NULLABLE_MAMBA_FIELDS),
    )
}


@final
@dataclass(frozen=True, kw_only=True)
class BambaConfig(DecoderConfig):
    """IBM's Bamba: half of each head is rotated."""

    rope: Rope | None = Rope()

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS["bamba"].read(given)
        fields = rotary_decoder_fields(given, share=0.5)
        return cls(
            **fields,
            layer_kinds=_layer_kinds(given, fields["num_layers"]),
            recurrence=mamba_sizes(given),
        )


def _layer_kinds(given: Mapping[str, Any], num_layers: int) -> tuple[LayerKind, ...]:
    """Return the kind of each layer, or raise UnsupportedModelError for a wrong index."""
    attention = given["attn_layer_indices"] or ()
    if not set(attention) <= set(range(num_layers)):
        raise UnsupportedModelError(
            f"attn_layer_indices={list(attention)} is not supported; give indices of the "
            f"{num_layers} layers"
        )
    return tuple("attention" if i in attention else "recurrent" for i in range(num_layers))


def mamba_sizes(given: Mapping[str, Any], *, inner: int | None = None, **more: Any) -> Mamba2Sizes:
    """Return the sizes of Mamba-2 in the values of `MAMBA_FIELDS`, and `more` of them.

    `inner` is the width of all heads, if it is not `mamba_expand` times the hidden size.
    """
    inner = given["mamba_expand"] * given["hidden_size"] if inner is None else inner
    num_heads, head_dim = given["mamba_n_heads"], given["mamba_d_head"]
    low, high = step_limits(given)
    return Mamba2Sizes(
        num_heads=num_heads,
        head_dim=inner // num_heads if head_dim == "auto" else int(head_dim),
        state_size=given["mamba_d_state"],
        num_groups=given["mamba_n_groups"],
        kernel_size=given["mamba_d_conv"],
        has_bias=bool(given["mamba_proj_bias"]),
        has_conv_bias=bool(given["mamba_conv_bias"]),
        min_step=low,
        max_step=high,
        **more,
    )


def _weights(config: BambaConfig) -> dict[str, Weight]:
    return {
        **attention_weights(config),
        **mlp_weights("feed_forward."),
        **mixer_weights("blocks.mixer.", LAYER + "mamba."),
        "blocks.mixer_norm.scale": Weight.of(LAYER + "input_layernorm.weight"),
        "norm.scale": Weight.of("model.final_layernorm.weight"),
        "blocks.mlp_norm.scale": Weight.of(LAYER + "pre_ff_layernorm.weight"),
    }


FAMILY = Family(fields=_FIELDS, config=BambaConfig, decoder=Decoder, weights=_weights)
