"""Llama 2 and 3, Mistral, Qwen 2 and 3 and the text of their VL models, SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, cast, final

from jaxserve.models.config import DecoderConfig, Fields, check_is
from jaxserve.models.decoder import Decoder
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, TwoLayerMLP
from jaxserve.models.llama_form import (
    ROTARY_FIELDS,
    LlamaBlock,
    attention_weights,
    mlp_weights,
    rotary_decoder_fields,
    two_layer_weights,
)
from jaxserve.models.norms import RMSNorm
from jaxserve.models.rope import Rope

_QWEN = Fields.of(
    ROTARY_FIELDS,
    vocab_size=151936,
    intermediate_size=22016,
    num_key_value_heads=32,
    max_position_embeddings=32768,
    use_sliding_window=False,
    sliding_window=4096,
    max_window_layers=28,
    layer_types=None,
    nullable=("num_key_value_heads", "sliding_window"),
)
_QWEN_2_VL = Fields.of(
    _QWEN.defaults,
    vocab_size=152064,
    hidden_size=8192,
    intermediate_size=29568,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_window_layers=80,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    nullable=(*_QWEN.nullable, "tie_word_embeddings", "use_sliding_window"),
)
_FIELDS = {
    "llama": Fields.of(ROTARY_FIELDS, attention_bias=False, mlp_bias=False),
    "internlm3": Fields.of(
        ROTARY_FIELDS,
        vocab_size=128512,
        intermediate_size=10240,
        num_hidden_layers=48,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        head_dim=128,
        attention_bias=False,
        mlp_bias=False,
        nullable=("head_dim", "num_key_value_heads"),
        aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    ),
    "cwm": Fields.of(
        ROTARY_FIELDS,
        vocab_size=128256,
        hidden_size=6144,
        intermediate_size=21504,
        num_hidden_layers=64,
        num_attention_heads=48,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        head_dim=128,
        mlp_bias=False,
        sliding_window=8192,
        layer_types=None,
    ),
    "arcee": Fields.of(
        ROTARY_FIELDS,
        hidden_size=2560,
        intermediate_size=18432,
        hidden_act="relu2",
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        attention_bias=False,
        mlp_bias=False,
    ),
    "mistral": Fields.of(
        ROTARY_FIELDS,
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        sliding_window=4096,
        nullable=("sliding_window",),
    ),
    "qwen2": _QWEN,
    "qwen2_vl_text": _QWEN_2_VL,
    "qwen2_5_vl_text": _QWEN_2_VL,
    "qwen3": replace(_QWEN, defaults={**_QWEN.defaults, "head_dim": 128, "attention_bias": False}),
    "qwen3_vl_text": Fields.of(
        ROTARY_FIELDS,
        vocab_size=151936,
        intermediate_size=22016,
        num_key_value_heads=32,
        max_position_embeddings=128000,
        rope_theta=5e5,
        head_dim=128,
        attention_bias=False,
        nullable=("num_key_value_heads", "tie_word_embeddings"),
    ),
}
# The rotation of CWM without the field.
_CWM = {
    "rope_parameters": dict(
        rope_type="llama3",
        rope_theta=1e6,
        factor=16.0,
        high_freq_factor=4.0,
        low_freq_factor=1.0,
        original_max_position_embeddings=8192,
    )
}


@final
@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """RMS norms, gated MLP, rotary embeddings of the whole head."""

    rope: Rope | None = Rope()
    is_gated: bool = True  # whether the MLP has a gate

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS[given["model_type"]].read(given)
        kind = given["model_type"]
        if kind == "cwm":
            given |= {name: _CWM[name] for name in _CWM if not given[name]}
            given["layer_types"] = given["layer_types"] or [
                "sliding_attention" if layer % 4 else "full_attention"
                for layer in range(given["num_hidden_layers"])
            ]
        check_is(given, "hidden_act", ("relu2",) if kind == "arcee" else ("silu", "swish"))
        attention_bias = bool(given.get("attention_bias"))
        return cls(
            **rotary_decoder_fields(given),
            qkv_bias=kind.startswith("qwen2") or attention_bias,
            o_bias=attention_bias,
            mlp_bias=bool(given.get("mlp_bias")),
            qk_norm=kind.startswith("qwen3"),
            activation=given["hidden_act"],
            is_gated=kind != "arcee",
        )


@final
class TwoLayerBlock(Block):
    norm_class = RMSNorm
    mlp_class = TwoLayerMLP


@final
class Llama(Decoder):
    block_class = LlamaBlock

    def _block_class(self, layer: int) -> type[Block]:
        is_gated = cast(LlamaConfig, self.config).is_gated
        return LlamaBlock if is_gated else TwoLayerBlock


FAMILY = Family(
    fields=_FIELDS,
    config=LlamaConfig,
    decoder=Llama,
    weights=lambda config: (
        attention_weights(config) | (mlp_weights() if config.is_gated else two_layer_weights())
    ),
)
