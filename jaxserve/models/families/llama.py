"""Llama 2 and 3, Mistral, Qwen 2 and 3 and the text of their VL models, SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast, final

from jaxserve.models.config import DecoderConfig, Fields, check_is, windows_by_kind
from jaxserve.models.decoder import Decoder
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, GatedMLP, TwoLayerMLP
from jaxserve.models.norms import RMSNorm
from jaxserve.models.rope import Rope, rope_fields
from jaxserve.models.weights import Weight, gate_and_up, split_qkv

# Fields that Llama and its relatives share.
ROTARY_FIELDS = dict(
    num_attention_heads=32,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    rope_parameters=None,
    rope_scaling=None,
    rope_theta=1e4,
    tie_word_embeddings=False,
    head_dim=None,
)
_QWEN = Fields(
    ROTARY_FIELDS
    | dict(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=22016,
        num_hidden_layers=32,
        num_key_value_heads=32,
        max_position_embeddings=32768,
        use_sliding_window=False,
        sliding_window=4096,
        max_window_layers=28,
        layer_types=None,
    ),
    nullable=("num_key_value_heads", "sliding_window"),
)
_QWEN_2_VL = replace(
    _QWEN,
    defaults={**_QWEN.defaults}
    | dict(
        vocab_size=152064,
        hidden_size=8192,
        intermediate_size=29568,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_window_layers=80,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
    ),
    nullable=(*_QWEN.nullable, "tie_word_embeddings", "use_sliding_window"),
)
_FIELDS = {
    "llama": Fields(
        ROTARY_FIELDS
        | dict(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_key_value_heads=None,
            max_position_embeddings=2048,
            attention_bias=False,
            mlp_bias=False,
        ),
    ),
    "internlm3": Fields(
        ROTARY_FIELDS
        | dict(
            vocab_size=128512,
            hidden_size=4096,
            intermediate_size=10240,
            num_hidden_layers=48,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            rms_norm_eps=1e-5,
            head_dim=128,
            attention_bias=False,
            mlp_bias=False,
        ),
        nullable=("head_dim", "num_key_value_heads"),
        aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    ),
    "cwm": Fields(
        ROTARY_FIELDS
        | dict(
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
    ),
    "arcee": Fields(
        ROTARY_FIELDS
        | dict(
            vocab_size=32000,
            hidden_size=2560,
            intermediate_size=18432,
            num_hidden_layers=32,
            num_key_value_heads=None,
            hidden_act="relu2",
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            attention_bias=False,
            mlp_bias=False,
        ),
    ),
    "mistral": Fields(
        ROTARY_FIELDS
        | dict(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            sliding_window=4096,
        ),
        nullable=("sliding_window",),
    ),
    "qwen2": _QWEN,
    "qwen2_vl_text": _QWEN_2_VL,
    "qwen2_5_vl_text": _QWEN_2_VL,
    "qwen3": replace(_QWEN, defaults={**_QWEN.defaults, "head_dim": 128, "attention_bias": False}),
    "qwen3_vl_text": Fields(
        ROTARY_FIELDS
        | dict(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=22016,
            num_hidden_layers=32,
            num_key_value_heads=32,
            max_position_embeddings=128000,
            rope_theta=5e5,
            head_dim=128,
            attention_bias=False,
        ),
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


def rotary_decoder_fields(given: Mapping[str, Any], share: float | None = None) -> dict[str, Any]:
    """Return the fields that families share whose config.json is like Llama's.

    `given` is the result of `Fields.read`; `share` is the rotated part of a head, unless the
    rotation's parameters have another; None for whole heads. Raises as `DecoderConfig.from_hf`.
    """
    rope = rope_fields(given)
    max_position = given["max_position_embeddings"]
    num_heads = given["num_attention_heads"]
    head_dim = given["head_dim"] or given["hidden_size"] // num_heads
    rotated = None if share is None else int(head_dim * rope.get("partial_rotary_factor", share))
    turned = Rope.from_hf(rope, max_position, rotated)
    return dict(
        vocab_size=given["vocab_size"],
        hidden_size=given["hidden_size"],
        intermediate_size=given["intermediate_size"],
        num_layers=given["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=given["num_key_value_heads"] or num_heads,
        head_dim=head_dim,
        norm_eps=given["rms_norm_eps"],
        rope=turned,
        max_position_embeddings=turned.longest_context(max_position),
        tie_word_embeddings=bool(given["tie_word_embeddings"]),
        sliding_windows=_sliding_windows(given),
    )


def _sliding_windows(given: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the window of each layer.

    Mistral, Mixtral and Qwen3-MoE have one in all layers, Qwen 2 and 3 in the named ones.
    """
    num_layers = given["num_hidden_layers"]
    window = given.get("sliding_window")
    if window is None or not given.get("use_sliding_window", True):
        return (None,) * num_layers
    if "layer_types" not in given:
        return (window,) * num_layers
    kinds = given["layer_types"]
    if kinds is None:
        first = min(given["max_window_layers"], num_layers)
        kinds = (["full_attention"] * first + ["sliding_attention"] * num_layers)[:num_layers]
    return windows_by_kind(kinds, window, num_layers)


@final
class LlamaBlock(Block):
    norm_class = RMSNorm
    mlp_class = GatedMLP


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


LAYER = "model.layers.{layer}."


def attention_weights(
    config: DecoderConfig, *, order: Mapping[str, Sequence[int]] | None = None
) -> dict[str, Weight]:
    """Return the weights of everything except the MLPs, under Llama's names.

    For `order` see `split_qkv`.
    """
    attention = LAYER + "self_attn."
    q_norm, k_norm = ("d",), ("d",)
    if config.wide_qk_norm:
        q_norm, k_norm = ("k g d", "(k g d)"), ("k x d", "(k x d)")
    return {
        "embedding": Weight.of("model.embed_tokens.weight", "v e"),
        "norm.scale": Weight.of("model.norm.weight"),
        "lm_head": Weight.of("lm_head.weight", "e v", "v e"),
        "blocks.attention_norm.scale": Weight.of(LAYER + "input_layernorm.weight"),
        "blocks.attention.wqkv": split_qkv(
            attention, "weight", config.group, order=order, has_gate=config.attention_gate
        ),
        "blocks.attention.bqkv": split_qkv(
            attention, "bias", config.group, order=order, has_gate=config.attention_gate
        ),
        "blocks.attention.q_norm.scale": Weight.of(attention + "q_norm.weight", *q_norm),
        "blocks.attention.k_norm.scale": Weight.of(attention + "k_norm.weight", *k_norm),
        "blocks.attention.sinks": Weight.of(attention + "sinks", "k g", "(k g)"),
        "blocks.attention.wo": Weight.of(attention + "o_proj.weight", "k g d e", "e (k g d)"),
        "blocks.attention.bo": Weight.of(attention + "o_proj.bias"),
        "blocks.mlp_norm.scale": Weight.of(LAYER + "post_attention_layernorm.weight"),
    }


def mlp_weights(name: str = "mlp.") -> dict[str, Weight]:
    """Return the weights of a `GatedMLP` under Llama's names, with its own instead of `mlp.`."""
    mlp = LAYER + name
    return {
        **{
            f"blocks.mlp.{name}": gate_and_up(
                f"{mlp}gate_proj.{kind}", f"{mlp}up_proj.{kind}", kind
            )
            for name, kind in (("gate_up", "weight"), ("bgate_up", "bias"))
        },
        "blocks.mlp.down": Weight.of(mlp + "down_proj.weight", "m e", "e m"),
        "blocks.mlp.bdown": Weight.of(mlp + "down_proj.bias"),
    }


def two_layer_weights(up: str = "up_proj", down: str = "down_proj") -> dict[str, Weight]:
    """Return the weights of a `TwoLayerMLP` under Llama's names."""
    mlp = LAYER + "mlp."
    return {
        "blocks.mlp.up": Weight.of(f"{mlp}{up}.weight", "e m", "m e"),
        "blocks.mlp.bup": Weight.of(f"{mlp}{up}.bias", "m"),
        "blocks.mlp.down": Weight.of(f"{mlp}{down}.weight", "m e", "e m"),
        "blocks.mlp.bdown": Weight.of(f"{mlp}{down}.bias"),
    }


FAMILY = Family(
    fields=_FIELDS,
    config=LlamaConfig,
    decoder=Llama,
    weights=lambda config: (
        attention_weights(config) | (mlp_weights() if config.is_gated else two_layer_weights())
    ),
)
