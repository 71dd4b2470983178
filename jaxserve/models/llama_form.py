"""What most families share with Llama: fields of config.json, and names of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.models.config import DecoderConfig, check_is, windows_by_kind
from jaxserve.models.rope import Rope, rope_fields
from jaxserve.models.weights import Weight, gated_mlp, split_qkv, two_layer_mlp

# Fields that Llama and its relatives share, with Llama's defaults.
ROTARY_FIELDS = dict(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    max_position_embeddings=2048,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    rope_parameters=None,
    rope_scaling=None,
    rope_theta=1e4,
    tie_word_embeddings=False,
    head_dim=None,
)
LAYER = "model.layers.{layer}."


def rotary_decoder_fields(
    given: Mapping[str, Any],
    share: float | None = None,
    *,
    activations: Sequence[str] = ("silu", "swish"),
) -> dict[str, Any]:
    """Return the fields that families share whose config.json is like Llama's.

    Raises as `DecoderConfig.from_hf`.

    Args:
      given: the result of `Fields.read`.
      share: the rotated part of a head, unless the rotation's parameters have another; None for
        whole heads.
      activations: the values of `hidden_act` that the family computes, if it has the field.
    """
    if "hidden_act" in given:
        check_is(given, "hidden_act", activations)
    bias = bool(given.get("attention_bias"))
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
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(given.get("mlp_bias")),
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
    return gated_mlp("blocks.mlp", LAYER + name)


def two_layer_weights(up: str = "up_proj", down: str = "down_proj") -> dict[str, Weight]:
    """Return the weights of a `TwoLayerMLP` under Llama's names."""
    return two_layer_mlp("blocks.mlp", f"{LAYER}mlp.{up}", f"{LAYER}mlp.{down}")
