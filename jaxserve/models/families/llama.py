"""Llama 2 and 3, Mistral, Qwen 2 and 3, SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.models.config import DecoderConfig, check_is, check_readable, windows_by_kind
from jaxserve.models.decoder import Decoder
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, GatedMLP
from jaxserve.models.norms import RMSNorm
from jaxserve.models.rope import Rope, rope_fields
from jaxserve.models.weights import Weight, gate_and_up, split_qkv

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


@final
@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """RMS norms, gated MLP, rotary embeddings of the whole head."""

    rope: Rope | None = Rope()

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        """See `DecoderConfig.from_hf`."""
        check_is(given, "hidden_act", ("silu", "swish"))
        kind = given["model_type"]
        attention_bias = bool(given.get("attention_bias", False))
        return cls(
            **rotary_decoder_fields(given),
            qkv_bias=kind == "qwen2" or (kind != "mistral" and attention_bias),
            o_bias=kind in ("llama", "qwen3") and attention_bias,
            mlp_bias=kind == "llama" and bool(given.get("mlp_bias", False)),
            qk_norm=kind == "qwen3",
        )


def rotary_decoder_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration that families share whose config.json is like Llama's.

    Raises:
      UnsupportedModelError: as `DecoderConfig.from_hf`.
    """
    check_readable(given, _REQUIRED)
    rope = rope_fields(given)
    rotated = rope.get("partial_rotary_factor") or given.get("partial_rotary_factor") or 1.0
    max_position = given.get("max_position_embeddings") or 2048
    num_heads = given["num_attention_heads"]
    head_dim = given.get("head_dim") or given["hidden_size"] // num_heads
    return dict(
        vocab_size=given["vocab_size"],
        hidden_size=given["hidden_size"],
        intermediate_size=given["intermediate_size"],
        num_layers=given["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=given.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        norm_eps=given.get("rms_norm_eps", 1e-6),
        rope=Rope.from_hf(rope, max_position, None if rotated == 1 else int(head_dim * rotated)),
        max_position_embeddings=max_position,
        tie_word_embeddings=bool(given.get("tie_word_embeddings", False)),
        sliding_windows=_sliding_windows(given),
    )


def _sliding_windows(given: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the window of each layer: Mistral has one in all, Qwen in those that it names."""
    num_layers = given["num_hidden_layers"]
    window = given.get("sliding_window")
    if given["model_type"] == "llama" or window is None:
        return (None,) * num_layers
    if given["model_type"] in ("mistral", "mixtral"):
        return (window,) * num_layers
    if not given.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = given.get("layer_types")
    if kinds is None:
        first = min(given.get("max_window_layers", 28), num_layers)
        kinds = (["full_attention"] * first + ["sliding_attention"] * num_layers)[:num_layers]
    return windows_by_kind(kinds, window, num_layers)


@final
class LlamaBlock(Block):
    """See `Block`."""

    norm_class = RMSNorm
    mlp_class = GatedMLP


@final
class Llama(Decoder):
    """See `Decoder`."""

    block_class = LlamaBlock


LAYER = "model.layers.{layer}."


def attention_weights(config: DecoderConfig) -> dict[str, Weight]:
    """Return the weights of everything except the MLPs, under Llama's names."""
    attention = LAYER + "self_attn."
    return {
        "embedding": Weight.of("model.embed_tokens.weight", "v e"),
        "norm.scale": Weight.of("model.norm.weight"),
        "lm_head": Weight.of("lm_head.weight", "e v", "v e"),
        "blocks.attention_norm.scale": Weight.of(LAYER + "input_layernorm.weight"),
        "blocks.attention.wqkv": split_qkv(attention, "weight", config.group),
        "blocks.attention.bqkv": split_qkv(attention, "bias", config.group),
        "blocks.attention.q_norm.scale": Weight.of(attention + "q_norm.weight", "d"),
        "blocks.attention.k_norm.scale": Weight.of(attention + "k_norm.weight", "d"),
        "blocks.attention.wo": Weight.of(attention + "o_proj.weight", "k g d e", "e (k g d)"),
        "blocks.attention.bo": Weight.of(attention + "o_proj.bias"),
        "blocks.mlp_norm.scale": Weight.of(LAYER + "post_attention_layernorm.weight"),
    }


def mlp_weights(name: str = "mlp.") -> dict[str, Weight]:
    """Return the weights of a `GatedMLP` under Llama's names, with its own in place of `mlp.`."""
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


FAMILY = Family(
    model_types=("llama", "mistral", "qwen2", "qwen3"),
    config=LlamaConfig,
    decoder=Llama,
    weights=lambda config: attention_weights(config) | mlp_weights(),
)
