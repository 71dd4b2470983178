"""Seed-OSS: Llama's layers with biases of queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.models.config import DecoderConfig, Fields, check_is
from jaxserve.models.family import Family
from jaxserve.models.llama_form import (
    ROTARY_FIELDS,
    LlamaDecoder,
    llama_weights,
    rotary_decoder_fields,
)
from jaxserve.models.rope import Rope

_FIELDS = {
    "seed_oss": Fields.of(
        ROTARY_FIELDS,
        vocab_size=155136,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=80,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=524288,
        attention_bias=True,
        attention_out_bias=False,
        mlp_bias=False,
        nullable=("num_key_value_heads", "head_dim"),
        pad_token_id=1,
    )
}


@final
@dataclass(frozen=True, kw_only=True)
class SeedOssConfig(DecoderConfig):
    """ByteDance Seed 2025."""

    rope: Rope | None = Rope()

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS["seed_oss"].read(given)
        check_is(given, "hidden_act", ("silu", "swish"))
        return cls(
            **rotary_decoder_fields(given),
            qkv_bias=bool(given["attention_bias"]),
            o_bias=bool(given["attention_out_bias"]),
            mlp_bias=bool(given["mlp_bias"]),
        )


FAMILY = Family(fields=_FIELDS, config=SeedOssConfig, decoder=LlamaDecoder, weights=llama_weights)
