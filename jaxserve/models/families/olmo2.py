"""OLMo 2 and 3, EXAONE 4: norms after attention and MLP, and of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from flax import nnx
from jaxtyping import Array, Float

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.attention import Attention
from jaxserve.models.config import DecoderConfig, Fields, check_is
from jaxserve.models.context import LayerContext
from jaxserve.models.decoder import Decoder
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, GatedMLP
from jaxserve.models.llama_form import (
    LAYER,
    ROTARY_FIELDS,
    attention_weights,
    mlp_weights,
    rotary_decoder_fields,
)
from jaxserve.models.norms import RMSNorm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.rope import Rope
from jaxserve.models.weights import Weight

_OLMO2 = ROTARY_FIELDS | dict(vocab_size=50304, attention_bias=False, rms_norm_eps=1e-5)
_FIELDS = {
    "olmo2": Fields(_OLMO2, pad_token_id=1),
    "olmo3": Fields.of(
        _OLMO2,
        rope_theta=5e5,
        sliding_window=4096,
        layer_types=None,
        nullable=("sliding_window",),
        pad_token_id=1,
    ),
    "exaone4": Fields.of(
        ROTARY_FIELDS,
        vocab_size=102400,
        intermediate_size=16384,
        num_key_value_heads=32,
        rms_norm_eps=1e-5,
        sliding_window=4096,
        sliding_window_pattern=4,
        layer_types=None,
        nullable=("sliding_window", "sliding_window_pattern"),
    ),
}


@final
@dataclass(frozen=True, kw_only=True)
class Olmo2Config(DecoderConfig):
    """OLMo 2 (arXiv:2501.00656) and 3 (arXiv:2512.13961), EXAONE 4 (arXiv:2507.11407)."""

    wide_qk_norm: bool = True
    rope: Rope | None = Rope()

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        fields = _FIELDS[given["model_type"]].read(given)
        check_is(fields, "hidden_act", ("silu", "swish"))
        if fields["model_type"] == "exaone4":
            return cls(**_exaone(fields))
        bias = bool(fields["attention_bias"])
        local_rope = None
        if fields["model_type"] == "olmo3":
            fields, local_rope = _by_kind(fields)
        sizes = rotary_decoder_fields(fields)
        return cls(**sizes, local_rope=local_rope, qkv_bias=bias, o_bias=bias)


def _exaone(given: dict[str, Any]) -> dict[str, Any]:
    """Return EXAONE 4's fields: norms of each head, and no rotation beside layers with a window."""
    window, every = given["sliding_window"], given["sliding_window_pattern"]
    num_layers = given["num_hidden_layers"]
    if given["layer_types"] is None:
        if window is None or not isinstance(every, int) or every < 1:
            raise UnsupportedModelError(
                f"sliding_window={window} with sliding_window_pattern={every!r} is not supported "
                "without layer_types; give the kind of each layer there"
            )
        given["layer_types"] = [
            "sliding_attention" if (layer + 1) % every else "full_attention"
            for layer in range(num_layers)
        ]
    rotated = tuple(window is None or kind == "sliding_attention" for kind in given["layer_types"])
    sizes = rotary_decoder_fields(given)
    return {**sizes, "rotated_layers": rotated, "qk_norm": True, "wide_qk_norm": False}


def _by_kind(given: dict[str, Any]) -> tuple[dict[str, Any], Rope]:
    """Return OLMo 3's fields with all kinds of layers, and the rotation of those with a window.

    `rope_scaling` is that of layers without one. A `rope_theta` beside it is that of all layers, as
    in transformers 4, which writes it there.
    """
    num_layers, by_kind = given["num_hidden_layers"], given["rope_parameters"] or {}
    theta = {"rope_theta": given["rope_theta"]}
    whole = theta | (by_kind.get("full_attention") or {}) | (given["rope_scaling"] or {})
    windowed = theta | (by_kind.get("sliding_attention") or {})
    kinds = given["layer_types"] or [
        "sliding_attention" if (layer + 1) % 4 else "full_attention" for layer in range(num_layers)
    ]
    given = given | {"rope_parameters": whole, "rope_scaling": None, "layer_types": kinds}
    return given, Rope.from_hf(windowed, given["max_position_embeddings"])


@final
class Olmo2Block(Block):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    norm_class = RMSNorm
    mlp_class = GatedMLP

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        nnx.Module.__init__(self)  # not `Block`'s, whose norms are before attention and MLP
        self.attention = Attention(config, new)
        self.attention_end_norm = RMSNorm(config, new)
        self.mlp = GatedMLP(config, new)
        self.mlp_end_norm = RMSNorm(config, new)

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        x = x + self.attention_end_norm(self.attention(x, context))
        return x + self.mlp_end_norm(self.mlp(x, context))


@final
class Olmo2(Decoder):
    block_class = Olmo2Block


def _weights(config: Olmo2Config) -> dict[str, Weight]:
    return {
        **attention_weights(config),
        **mlp_weights(),
        "blocks.attention_end_norm.scale": Weight.of(LAYER + "post_attention_layernorm.weight"),
        "blocks.mlp_end_norm.scale": Weight.of(LAYER + "post_feedforward_layernorm.weight"),
    }


FAMILY = Family(fields=_FIELDS, config=Olmo2Config, decoder=Olmo2, weights=_weights)
