"""SmolLM3: Llama's layers, some of them without rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.core.errors import UnsupportedModelError
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
    "smollm3": Fields.of(
        ROTARY_FIELDS,
        vocab_size=128256,
        hidden_size=2048,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        rope_theta=2e6,
        use_sliding_window=False,
        sliding_window=None,
        no_rope_layers=None,
        no_rope_layer_interval=4,
        layer_types=None,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=True,
        nullable=("num_key_value_heads",),
        pad_token_id=128004,
    )
}


@final
@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(DecoderConfig):
    """Every fourth layer is not rotated (Yang et al., arXiv:2501.18795, section 3)."""

    rope: Rope | None = Rope()

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS["smollm3"].read(given)
        check_is(given, "hidden_act", ("silu", "swish"))
        rotated = _rotated_layers(given)
        kinds = given["layer_types"]
        if kinds is None:  # layers without rotation have windows
            windowed = given["use_sliding_window"] and given["sliding_window"] is not None
            kinds = [
                "full_attention" if is_rotated or not windowed else "sliding_attention"
                for is_rotated in rotated
            ]
        bias = bool(given["attention_bias"])
        # transformers' masks follow layer_types, whatever use_sliding_window is.
        fields = rotary_decoder_fields(given | dict(layer_types=kinds, use_sliding_window=True))
        return cls(
            **fields,
            rotated_layers=rotated,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bool(given["mlp_bias"]),
        )


def _rotated_layers(given: Mapping[str, Any]) -> tuple[bool, ...]:
    num_layers, flags = given["num_hidden_layers"], given["no_rope_layers"]
    if flags is None:
        every = given["no_rope_layer_interval"]
        return tuple((layer + 1) % every != 0 for layer in range(num_layers))
    if len(flags) < num_layers:
        raise UnsupportedModelError(
            f"no_rope_layers={list(flags)} is not supported; give 1 for a layer with rotation and "
            f"0 for one without, for each of the {num_layers} layers"
        )
    return tuple(bool(flag) for flag in flags[:num_layers])


FAMILY = Family(fields=_FIELDS, config=SmolLM3Config, decoder=LlamaDecoder, weights=llama_weights)
