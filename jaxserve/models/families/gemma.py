"""Gemma 1 to 3 and VaultGemma: scaled embeddings; norms on both sides and windows from 2 on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.models.config import DecoderConfig, Fields, check_is, kinds_in_turn, windows_by_kind
from jaxserve.models.decoder import Decoder
from jaxserve.models.family import Family
from jaxserve.models.layers import activation_of
from jaxserve.models.llama_form import LAYER, attention_weights, mlp_weights
from jaxserve.models.rope import Rope, rope_fields
from jaxserve.models.weights import Weight

# Fields that Gemma 2 to 4 share.
GEMMA_FIELDS = dict(
    hidden_size=2304,
    intermediate_size=9216,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    rope_parameters=None,
    attention_bias=False,
    layer_types=None,
    use_bidirectional_attention=None,
)
_GEMMA2 = Fields.of(
    GEMMA_FIELDS,
    vocab_size=256000,
    num_hidden_layers=26,
    max_position_embeddings=8192,
    rope_scaling=None,
    rope_theta=1e4,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    final_logit_softcapping=30.0,
    attn_logit_softcapping=50.0,
    nullable=("sliding_window", "final_logit_softcapping", "attn_logit_softcapping"),
    pad_token_id=0,
)
_FIELDS = {
    "gemma": Fields.of(
        vocab_size=256000,
        hidden_size=3072,
        intermediate_size=24576,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=256,
        hidden_act="gelu_pytorch_tanh",
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_parameters=None,
        rope_scaling=None,
        rope_theta=1e4,
        attention_bias=False,
        use_bidirectional_attention=None,
        pad_token_id=0,
    ),
    "gemma2": _GEMMA2,
    "vaultgemma": Fields.of(
        _GEMMA2.defaults, without=("use_bidirectional_attention",), nullable=_GEMMA2.nullable
    ),
    "gemma3_text": Fields.of(
        _GEMMA2.defaults,
        vocab_size=262208,
        max_position_embeddings=131072,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        sliding_window_pattern=6,
        final_logit_softcapping=None,
        attn_logit_softcapping=None,
        use_bidirectional_attention=False,
        nullable=("sliding_window", "use_bidirectional_attention"),
        pad_token_id=0,
    ),
}

# What Gemma 1 lacks of Gemma 2.
_WITHOUT_WINDOWS: dict[str, Any] = dict(
    sliding_window=None, attn_logit_softcapping=None, final_logit_softcapping=None
)


@final
@dataclass(frozen=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    """Gemma 1 (arXiv:2403.08295), 2 (arXiv:2408.00118) with soft caps, 3 (arXiv:2503.19786)."""

    activation: str = "gelu_pytorch_tanh"
    norm_offset: float = 1.0
    tie_word_embeddings: bool = True
    rope: Rope | None = Rope()
    mlp_norm_name: str = "pre_feedforward_layernorm"  # in checkpoints

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS[given["model_type"]].read(given)
        if "use_bidirectional_attention" in given:
            check_is(given, "use_bidirectional_attention", (False, None))
        kind, num_layers = given["model_type"], given["num_hidden_layers"]
        max_position = given["max_position_embeddings"]
        bias = bool(given["attention_bias"])
        if kind == "gemma":
            activation = given["hidden_act"]
            given |= _WITHOUT_WINDOWS | {
                # The releases' "gelu" means the approximation, as in transformers.
                "hidden_activation": "gelu_pytorch_tanh" if activation == "gelu" else activation,
                "layer_types": ["full_attention"] * num_layers,
                "query_pre_attn_scalar": given["head_dim"],
            }
        # Every second layer of Gemma 2 sees the whole context, every sixth of Gemma 3.
        every = given.get("sliding_window_pattern", 2)
        kinds = given["layer_types"] or kinds_in_turn(num_layers, every)
        rope, local_rope = _ropes(given, max_position)
        return cls(
            vocab_size=given["vocab_size"],
            hidden_size=given["hidden_size"],
            intermediate_size=given["intermediate_size"],
            num_layers=num_layers,
            num_heads=given["num_attention_heads"],
            num_kv_heads=given["num_key_value_heads"],
            head_dim=given["head_dim"],
            # Gemma 3's value includes its scaling.
            max_position_embeddings=rope.longest_context(max_position)
            if kind != "gemma3_text"
            else max_position,
            activation=activation_of(given, "hidden_activation"),
            norm_eps=given["rms_norm_eps"],
            tie_word_embeddings=bool(given["tie_word_embeddings"]),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=kind == "gemma3_text",
            attention_scale=given["query_pre_attn_scalar"] ** -0.5,
            attention_soft_cap=given["attn_logit_softcapping"],
            logits_soft_cap=given["final_logit_softcapping"],
            norm_places="around" if kind in ("gemma2", "gemma3_text") else "before",
            mlp_norm_name="post_attention_layernorm"
            if kind == "gemma"
            else "pre_feedforward_layernorm",
            rope=rope,
            local_rope=local_rope,
            sliding_windows=windows_by_kind(kinds, given["sliding_window"], num_layers),
        )


def _ropes(given: Mapping[str, Any], max_position: int) -> tuple[Rope, Rope | None]:
    """Return the rotary embeddings of layers that see the whole context, and with a window."""
    if given["model_type"] != "gemma3_text":
        return Rope.from_hf(rope_fields(given), max_position), None
    by_kind = given["rope_parameters"] or {}
    whole = {
        "rope_theta": given["rope_theta"],
        **(by_kind.get("full_attention") or {}),
        **(given["rope_scaling"] or {}),
    }
    window = {
        "rope_theta": given["rope_local_base_freq"],
        **(by_kind.get("sliding_attention") or {}),
    }
    return Rope.from_hf(whole, max_position), Rope.from_hf(window, max_position)


class Gemma(Decoder):
    """A `Decoder` whose embeddings are multiplied by sqrt(embed)."""

    def _embed(
        self,
        tokens: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, "tokens embed"]:
        x = self._embedded(tokens, adapter)
        return x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)


def _weights(config: GemmaConfig) -> dict[str, Weight]:
    weights = attention_weights(config) | mlp_weights()
    names = {"blocks.mlp_norm.scale": config.mlp_norm_name}
    if config.norm_places == "around":
        names["blocks.attention_end_norm.scale"] = "post_attention_layernorm"
        names["blocks.mlp_end_norm.scale"] = "post_feedforward_layernorm"
    return weights | {path: Weight.of(f"{LAYER}{name}.weight") for path, name in names.items()}


FAMILY = Family(fields=_FIELDS, config=GemmaConfig, decoder=Gemma, weights=_weights)
