"""Granite 3 and 4: Llama's layers with factors of the embedding, the residuals and the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, cast, final

from jaxtyping import Array, Float, Int32

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig, Fields, check_is
from jaxserve.models.context import LayerContext
from jaxserve.models.decoder import Decoder
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, GatedMLP, scaled
from jaxserve.models.llama_form import ROTARY_FIELDS, llama_weights, rotary_decoder_fields
from jaxserve.models.norms import RMSNorm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.rope import Rope

# Fields of Granite and its relatives with factors.
FACTORS = dict(
    embedding_multiplier=1.0, logits_scaling=1.0, residual_multiplier=1.0, attention_multiplier=1.0
)
_FIELDS = {"granite": Fields.of(ROTARY_FIELDS, FACTORS, attention_bias=False, mlp_bias=False)}


@dataclass(frozen=True, kw_only=True)
class GraniteFactors(DecoderConfig):
    """A configuration with factors, which muP gives to a model (Yang et al., arXiv:2203.03466)."""

    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # the factor of what attention and MLP add to the residual stream


def factor_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the factors in config.json; raise UnsupportedModelError if logits are divided by 0."""
    if not given["logits_scaling"]:
        raise UnsupportedModelError(
            "logits_scaling=0 is not supported; give the number that logits are divided by"
        )
    return dict(
        embedding_scale=float(given["embedding_multiplier"]),
        residual_scale=float(given["residual_multiplier"]),
        attention_scale=float(given["attention_multiplier"]),
        logits_scale=1.0 / given["logits_scaling"],
    )


@final
@dataclass(frozen=True, kw_only=True)
class GraniteConfig(GraniteFactors):
    """Granite 3 (IBM 2024), and Granite 4 without experts and recurrent layers."""

    rope: Rope | None = Rope()

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS["granite"].read(given)
        check_is(given, "hidden_act", ("silu", "swish"))
        bias = bool(given["attention_bias"])
        return cls(
            **rotary_decoder_fields(given),
            **factor_fields(given),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bool(given["mlp_bias"]),
        )


class GraniteBlock(Block):
    """x + s * attention(norm(x)), then x + s * mlp(norm(x)), with s = `residual_scale`."""

    norm_class = RMSNorm
    mlp_class = GatedMLP

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        super().__init__(config, new)
        self.residual_scale = cast(GraniteFactors, config).residual_scale

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        attended = self.attention(x, context, norm=self.attention_norm)
        x = x + scaled(attended, self.residual_scale)
        return x + scaled(self.mlp(x, context, norm=self.mlp_norm), self.residual_scale)


class Granite(Decoder):
    """A `Decoder` whose embeddings are multiplied by `embedding_scale`."""

    block_class = GraniteBlock

    def _embed(
        self,
        tokens: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, "tokens embed"]:
        config = cast(GraniteFactors, self.config)
        return scaled(self._embedded(tokens, adapter), config.embedding_scale)


FAMILY = Family(fields=_FIELDS, config=GraniteConfig, decoder=Granite, weights=llama_weights)
