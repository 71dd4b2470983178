"""The text of Llama 4: attention in chunks with rotation, and in all tokens without; experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, final

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig, Fields, QueryGrowth
from jaxserve.models.decoder import Decoder
from jaxserve.models.experts import ExpertNames, expert_weights
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, Sublayer
from jaxserve.models.llama_form import (
    LAYER,
    ROTARY_FIELDS,
    attention_weights,
    mlp_weights,
    rotary_decoder_fields,
)
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.rope import Rope
from jaxserve.models.routing import ExpertsConfig
from jaxserve.models.weights import Weight, neighbours

_FIELDS = {
    "llama4_text": Fields.of(
        ROTARY_FIELDS,
        vocab_size=202048,
        hidden_size=5120,
        intermediate_size=8192,
        intermediate_size_mlp=16384,
        num_hidden_layers=48,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        attention_bias=False,
        num_experts_per_tok=1,
        num_local_experts=16,
        moe_layers=None,
        interleave_moe_layer_step=1,
        use_qk_norm=True,
        no_rope_layers=None,
        no_rope_layer_interval=4,
        attention_chunk_size=8192,
        layer_types=None,
        attn_temperature_tuning=True,
        floor_scale=8192,
        attn_scale=0.1,
        nullable=("attention_chunk_size",),
    )
}


@final
@dataclass(frozen=True, kw_only=True)
class Llama4Config(DecoderConfig):
    """Llama 4 Scout and Maverick (Meta 2025)."""

    rope: Rope | None = Rope()

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS["llama4_text"].read(given)
        layers = range(given["num_hidden_layers"])
        interval, step = given["no_rope_layer_interval"], given["interleave_moe_layer_step"]
        # A number for each layer, 1 for those that are rotated.
        rotated = given["no_rope_layers"] or [int((i + 1) % interval != 0) for i in layers]
        sparse = given["moe_layers"]
        sparse = range(step - 1, len(layers), step) if sparse is None else sparse
        growth = QueryGrowth(beta=float(given["attn_scale"]), period=given["floor_scale"], offset=1)
        return cls(
            **rotary_decoder_fields({**given, "layer_types": None})
            | {"intermediate_size": given["intermediate_size_mlp"]},
            unit_qk_norm=bool(given["use_qk_norm"]),
            query_growth=growth if given["attn_temperature_tuning"] else None,
            rotated_layers=tuple(map(bool, rotated)),
            attention_chunks=_chunks(given, rotated),
            experts=ExpertsConfig.from_hf(
                given,
                scores="sigmoid",
                normalises_gates=False,
                scales_input=True,
                shared_size=given["intermediate_size"],
                layout="in_out",
            ),
            mlp_kinds=tuple("experts" if i in sparse else "dense" for i in layers),
        )


def _chunks(given: Mapping[str, Any], rotated: list[int]) -> tuple[int | None, ...]:
    """Return the chunk of each layer, or raise UnsupportedModelError for an unknown kind."""
    chunk, kinds = given["attention_chunk_size"], given["layer_types"]
    if kinds is None:
        return tuple(chunk if each else None for each in rotated)
    unknown = sorted(set(kinds) - {"full_attention", "chunked_attention"})
    if unknown or chunk is None and "chunked_attention" in kinds:
        raise UnsupportedModelError(
            f"layer_types={list(kinds)} with attention_chunk_size={chunk} is not supported; give "
            "'full_attention' or 'chunked_attention' for each layer, and the size of a chunk"
        )
    return tuple(chunk if kind == "chunked_attention" else None for kind in kinds)


class Llama4Block(Block):
    """A layer that is rotated, with norms of queries and keys, or whose queries grow."""

    is_rotated: ClassVar[bool] = True

    def __init__(
        self, config: DecoderConfig, new: ParamMaker, *, mlp_class: type[Sublayer] | None = None
    ):
        own: dict[str, Any] = {"query_growth": None} if self.is_rotated else {"unit_qk_norm": False}
        super().__init__(replace(config, **own), new, mlp_class=mlp_class)


@final
class _UnrotatedBlock(Llama4Block):
    is_rotated = False


@final
class Llama4(Decoder):
    block_class = Llama4Block

    def _block_class(self, layer: int) -> type[Block]:
        return Llama4Block if self.config.rotated_layers[layer] else _UnrotatedBlock


_NAMES = ExpertNames(mlp="feed_forward.", router="router.weight")


def _weights(config: Llama4Config) -> dict[str, Weight]:
    order = neighbours(config.head_dim, config.head_dim)
    return {
        **attention_weights(config, order=order),
        **mlp_weights("feed_forward."),
        **expert_weights(config, LAYER, _NAMES),
    }


FAMILY = Family(fields=_FIELDS, config=Llama4Config, decoder=Llama4, weights=_weights)
