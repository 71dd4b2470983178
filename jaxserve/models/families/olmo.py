"""OLMo: Llama's layers with norms without parameters, and clipped queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.kernels import layer_norm
from jaxserve.models.config import DecoderConfig, Fields, check_is
from jaxserve.models.decoder import Decoder
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, GatedMLP
from jaxserve.models.linear import SumsRows
from jaxserve.models.llama_form import ROTARY_FIELDS, llama_weights, rotary_decoder_fields
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.rope import Rope

_EPS = 1e-5  # which no field of config.json sets
_FIELDS = {
    "olmo": Fields.of(
        ROTARY_FIELDS,
        without=("rms_norm_eps",),
        vocab_size=50304,
        attention_bias=False,
        clip_qkv=None,
        pad_token_id=1,
    )
}


@final
@dataclass(frozen=True, kw_only=True)
class OlmoConfig(DecoderConfig):
    """Groeneveld et al., arXiv:2402.00838."""

    rope: Rope | None = Rope()

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS["olmo"].read(given)
        check_is(given, "hidden_act", ("silu", "swish"))
        bias = bool(given["attention_bias"])
        return cls(
            **rotary_decoder_fields({**given, "rms_norm_eps": _EPS}),
            qkv_bias=bias,
            o_bias=bias,
            qkv_clip=given["clip_qkv"],
        )


@final
class BareLayerNorm(SumsRows):
    """A layer norm without scale and bias."""

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        self.eps = config.norm_eps

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        one = jnp.ones(x.shape[-1:], x.dtype)
        return layer_norm(x, one, 0 * one, eps=self.eps, implementation=self.row_kernels)


@final
class OlmoBlock(Block):
    norm_class = BareLayerNorm
    mlp_class = GatedMLP


@final
class Olmo(Decoder):
    block_class = OlmoBlock


FAMILY = Family(fields=_FIELDS, config=OlmoConfig, decoder=Olmo, weights=llama_weights)
