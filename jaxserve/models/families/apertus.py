"""Apertus: Llama's layers with an activation that has learned factors, and norms of heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.models.config import DecoderConfig, Fields
from jaxserve.models.decoder import Decoder
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, TwoLayerMLP
from jaxserve.models.llama_form import (
    LAYER,
    ROTARY_FIELDS,
    attention_weights,
    rotary_decoder_fields,
    two_layer_weights,
)
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.rope import Rope
from jaxserve.models.weights import Weight

# Of the rotation, without the field.
_ROTATION = dict(
    rope_type="llama3",
    rope_theta=12e6,
    factor=8.0,
    original_max_position_embeddings=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
# Constants of the activation, which checkpoints also have as tensors.
_BETA, _EPS = 0.5, -1e-6
_FIELDS = {
    "apertus": Fields.of(
        ROTARY_FIELDS,
        vocab_size=131072,
        intermediate_size=14336,
        hidden_act="xielu",
        max_position_embeddings=65536,
        rms_norm_eps=1e-5,
        rope_theta=12e6,
        attention_bias=False,
    )
}


@final
@dataclass(frozen=True, kw_only=True)
class ApertusConfig(DecoderConfig):
    """Swiss AI, arXiv:2509.14233."""

    activation: str = "xielu"
    rope: Rope | None = Rope()

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS["apertus"].read(given)
        given["rope_parameters"] = given["rope_parameters"] or _ROTATION
        return cls(**rotary_decoder_fields(given, activations=("xielu",)), qk_norm=True)


@final
class XieluMLP(TwoLayerMLP):
    """down(xielu(up(x))); xIELU (Huang and Schlag, arXiv:2411.13010) is quadratic above zero.

    up, down                           as in `TwoLayerMLP`
    alpha_positive, alpha_negative     [1], before a softplus
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        super().__init__(config, new)
        self.alpha_positive = new.ones((None,), (1,))
        self.alpha_negative = new.ones((None,), (1,))

    def _activated(self, x: Float[Array, "tokens mlp"]) -> Float[Array, "tokens mlp"]:
        wide = x.astype(jnp.float32)
        positive = jax.nn.softplus(self.alpha_positive[...].astype(jnp.float32))
        negative = _BETA + jax.nn.softplus(self.alpha_negative[...].astype(jnp.float32))
        bent = jnp.where(
            wide > 0, positive * wide * wide, negative * (jnp.expm1(jnp.minimum(wide, _EPS)) - wide)
        )
        return (bent + _BETA * wide).astype(x.dtype)


@final
class ApertusBlock(Block):
    mlp_class = XieluMLP


@final
class Apertus(Decoder):
    block_class = ApertusBlock


def _weights(config: ApertusConfig) -> dict[str, Weight]:
    own = {
        "blocks.attention_norm.scale": "attention_layernorm.weight",
        "blocks.mlp_norm.scale": "feedforward_layernorm.weight",
    }
    return {
        **attention_weights(config),
        **two_layer_weights(),
        **{path: Weight.of(LAYER + name) for path, name in own.items()},
        "blocks.mlp.alpha_positive": Weight.of(LAYER + "mlp.act_fn.alpha_p", "o"),
        "blocks.mlp.alpha_negative": Weight.of(LAYER + "mlp.act_fn.alpha_n", "o"),
    }


FAMILY = Family(
    fields=_FIELDS,
    config=ApertusConfig,
    decoder=Apertus,
    weights=_weights,
    constants={LAYER + "mlp.act_fn.beta": _BETA, LAYER + "mlp.act_fn.eps": _EPS},
)
