"""Ministral, with windows by layer, and Ministral 3, whose queries grow with the position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.models.config import DecoderConfig, Fields, QueryGrowth, check_is
from jaxserve.models.family import Family
from jaxserve.models.llama_form import (
    ROTARY_FIELDS,
    LlamaDecoder,
    llama_weights,
    rotary_decoder_fields,
)
from jaxserve.models.rope import Rope, rope_fields

_FIELDS = {
    "ministral": Fields.of(
        ROTARY_FIELDS,
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        sliding_window=4096,
        layer_types=None,
        nullable=("sliding_window",),
    ),
    "ministral3": Fields.of(
        ROTARY_FIELDS,
        vocab_size=131072,
        intermediate_size=14336,
        num_hidden_layers=34,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=262144,
        rms_norm_eps=1e-5,
        sliding_window=None,
        pad_token_id=11,
    ),
}
# The rotation of a Ministral 3 whose config.json has none.
_ROTATION = dict(
    rope_type="yarn",
    rope_theta=1e6,
    factor=16.0,
    original_max_position_embeddings=16384,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale_all_dim=1.0,
    mscale=1.0,
    llama_4_scaling_beta=0.1,
)


@final
@dataclass(frozen=True, kw_only=True)
class MinistralConfig(DecoderConfig):
    """Mistral AI 2024 (Ministral 8B) and 2025 (Ministral 3)."""

    rope: Rope | None = Rope()

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        fields = _FIELDS[given["model_type"]].read(given)
        check_is(fields, "hidden_act", ("silu", "swish"))
        if fields["model_type"] == "ministral3":
            if fields["rope_scaling"] is None and fields["rope_parameters"] is None:
                fields["rope_parameters"] = _ROTATION
            return cls(**rotary_decoder_fields(fields), query_growth=_query_growth(fields))
        if fields["layer_types"] is None:
            fields["layer_types"] = ["sliding_attention"] * fields["num_hidden_layers"]
        return cls(**rotary_decoder_fields(fields))


def _query_growth(given: Mapping[str, Any]) -> QueryGrowth | None:
    rope = rope_fields(given)
    beta = rope.get("llama_4_scaling_beta")
    period = rope.get("original_max_position_embeddings") or given["max_position_embeddings"]
    return QueryGrowth(beta=float(beta), period=int(period)) if beta else None


FAMILY = Family(fields=_FIELDS, config=MinistralConfig, decoder=LlamaDecoder, weights=llama_weights)
