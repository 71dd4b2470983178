"""Phi-3 and Phi-4-mini: Llama's layers from fused tensors, with longrope and partial rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig, Fields, check_is
from jaxserve.models.family import Family
from jaxserve.models.llama_form import (
    LAYER,
    ROTARY_FIELDS,
    LlamaDecoder,
    attention_weights,
    rotary_decoder_fields,
)
from jaxserve.models.rope import Rope, rope_fields
from jaxserve.models.weights import Weight, fused_qkv

_FIELDS = {
    "phi3": Fields.of(
        ROTARY_FIELDS,
        vocab_size=32064,
        hidden_size=3072,
        intermediate_size=8192,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        partial_rotary_factor=1.0,
        rms_norm_eps=1e-5,
        sliding_window=None,
        pad_token_id=32000,
    )
}


@final
@dataclass(frozen=True, kw_only=True)
class Phi3Config(DecoderConfig):
    """Phi-3 (arXiv:2404.14219) and Phi-4-mini (arXiv:2503.01743)."""

    rope: Rope | None = Rope()

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS["phi3"].read(given)
        check_is(given, "hidden_act", ("silu", "swish"))
        rope = {"rope_scaling": None, "rope_parameters": _rotation(given)}
        return cls(**rotary_decoder_fields({**given, **rope}, given["partial_rotary_factor"]))


def _rotation(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the rotation; the original context is a field beside them."""
    rope = rope_fields(given)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "longrope", "su", "yarn"):
        raise UnsupportedModelError(
            f"RoPE scaling {kind!r} is not supported for 'phi3'; only 'longrope' is, which older "
            "folders call 'su' or 'yarn'"
        )
    original = given["original_max_position_embeddings"]
    kind = kind if kind == "default" else "longrope"
    return {**rope, "rope_type": kind, "original_max_position_embeddings": original}


def _weights(config: Phi3Config) -> dict[str, Weight]:
    attention, mlp = LAYER + "self_attn.", LAYER + "mlp."
    sizes = dict(num_kv_heads=config.num_kv_heads, group=config.group, head_dim=config.head_dim)
    return {
        **attention_weights(config),
        "blocks.attention.wqkv": fused_qkv(attention + "qkv_proj.weight", "weight", **sizes),
        "blocks.mlp.gate_up": Weight.of(mlp + "gate_up_proj.weight", "e u m", "(u m) e"),
        "blocks.mlp.down": Weight.of(mlp + "down_proj.weight", "m e", "e m"),
    }


FAMILY = Family(fields=_FIELDS, config=Phi3Config, decoder=LlamaDecoder, weights=_weights)
