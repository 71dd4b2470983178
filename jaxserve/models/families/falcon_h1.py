"""Falcon-H1: attention and Mamba-2 side by side in each layer, with factors everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, cast, final

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.attention import Attention
from jaxserve.models.config import DecoderConfig, Fields
from jaxserve.models.context import LayerContext
from jaxserve.models.decoder import Decoder
from jaxserve.models.families.bamba import MAMBA_FIELDS, NULLABLE_MAMBA_FIELDS, mamba_sizes
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, GatedMLP, scaled
from jaxserve.models.llama_form import (
    LAYER,
    ROTARY_FIELDS,
    attention_weights,
    mlp_weights,
    rotary_decoder_fields,
)
from jaxserve.models.mamba import Mamba2Mixer, mixer_weights
from jaxserve.models.norms import RMSNorm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.rope import Rope
from jaxserve.models.weights import Weight

_FIELDS = {
    "falcon_h1": Fields.of(
        ROTARY_FIELDS,
        MAMBA_FIELDS,
        vocab_size=128000,
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        attention_bias=False,
        mlp_bias=False,
        projectors_bias=False,
        mamba_d_ssm=1024,
        mamba_rms_norm=False,
        mamba_norm_before_gate=True,
        lm_head_multiplier=1.0,
        embedding_multiplier=1.0,
        mlp_multipliers=None,
        key_multiplier=1.0,
        attention_out_multiplier=1.0,
        attention_in_multiplier=1.0,
        ssm_multipliers=None,
        ssm_in_multiplier=1.0,
        ssm_out_multiplier=1.0,
        nullable=(
            *NULLABLE_MAMBA_FIELDS,
            *("num_key_value_heads", "mamba_d_ssm", "mamba_rms_norm", "mamba_norm_before_gate"),
            "projectors_bias",
        ),
    )
}


@final
@dataclass(frozen=True, kw_only=True)
class FalconH1Config(DecoderConfig):
    """Zuo et al., arXiv:2507.22448. Keys' factor is a part of `attention_scale`.

    Attributes:
      attention_in, attention_out, mixer_in, mixer_out: the factors of what these parts read and
        give.
      mlp_gate, mlp_out: the factors before the activation of an MLP, and of what it gives.
    """

    rope: Rope | None = Rope()
    attention_in: float = 1.0
    attention_out: float = 1.0
    mixer_in: float = 1.0
    mixer_out: float = 1.0
    mlp_gate: float = 1.0
    mlp_out: float = 1.0

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS["falcon_h1"].read(given)
        fields = rotary_decoder_fields(given)
        mlp_gate, mlp_out = _factors(given, "mlp_multipliers", 2)
        gate, x, b, c, step = _factors(given, "ssm_multipliers", 5)
        norm = "before_gate" if given["mamba_norm_before_gate"] else "after_gate"
        sizes = mamba_sizes(
            given,
            inner=given["mamba_d_ssm"],
            has_out_bias=bool(given["projectors_bias"]),
            norm=norm if given["mamba_rms_norm"] else None,
            factors=(gate, x, b, c, step),
        )
        return cls(
            **fields,
            attention_scale=given["key_multiplier"] * fields["head_dim"] ** -0.5,
            embedding_scale=float(given["embedding_multiplier"]),
            logits_scale=float(given["lm_head_multiplier"]),
            attention_in=given["attention_in_multiplier"],
            attention_out=given["attention_out_multiplier"],
            mixer_in=given["ssm_in_multiplier"],
            mixer_out=given["ssm_out_multiplier"],
            mlp_gate=mlp_gate,
            mlp_out=mlp_out,
            layer_kinds=("both",) * fields["num_layers"],
            recurrence=sizes,
        )


def _factors(given: Mapping[str, Any], name: str, num: int) -> tuple[float, ...]:
    """Return a list of factors in config.json; raise UnsupportedModelError for another length."""
    factors = given[name] or [1.0] * num
    if len(factors) != num:
        raise UnsupportedModelError(f"{name}={factors} is not supported; give {num} numbers")
    return tuple(float(factor) for factor in factors)


@final
class FalconH1Block(Block):
    """x + mixer(norm(x)) + attention(norm(x)), with one norm, then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        nnx.Module.__init__(self)  # not `Block`'s, which makes no mixer
        self.config = cast(FalconH1Config, config)
        self.attention_norm = RMSNorm(config, new)
        self.attention = Attention(config, new)
        self.mixer = Mamba2Mixer(config, new)
        self.mlp_norm = RMSNorm(config, new)
        self.mlp = GatedMLP(config, new, gate=ScaledGate(self.config.mlp_gate))

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        config, normed = self.config, self.attention_norm(x)
        mixed = scaled(self.mixer(scaled(normed, config.mixer_in), context), config.mixer_out)
        attended = self.attention(scaled(normed, config.attention_in), context)
        x = x + (mixed + scaled(attended, config.attention_out))
        return x + scaled(self.mlp(x, context, norm=self.mlp_norm), config.mlp_out)


@final
@dataclass(frozen=True)
class ScaledGate:
    """silu(factor * gate) * up."""

    factor: float

    def __call__(self, both: Float[Array, "tokens 2 out"]) -> Float[Array, "tokens out"]:
        return jax.nn.silu(scaled(both[:, 0], self.factor)) * both[:, 1]


@final
class FalconH1(Decoder):
    block_class = FalconH1Block


def _weights(config: FalconH1Config) -> dict[str, Weight]:
    return {
        **attention_weights(config),
        **mlp_weights("feed_forward."),
        **mixer_weights("blocks.mixer.", LAYER + "mamba."),
        "norm.scale": Weight.of("model.final_layernorm.weight"),
        "blocks.mlp_norm.scale": Weight.of(LAYER + "pre_ff_layernorm.weight"),
    }


FAMILY = Family(fields=_FIELDS, config=FalconH1Config, decoder=FalconH1, weights=_weights)
