"""MPT: GPT-2's layers with ALiBi, and neither positions nor biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig, Fields, alibi_slopes, check_is, plain_sizes
from jaxserve.models.decoder import Decoder
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, TwoLayerMLP
from jaxserve.models.norms import LayerNorm
from jaxserve.models.weights import Weight, layer_norm

_FIELDS = {
    "mpt": Fields.of(
        d_model=2048,
        n_heads=16,
        n_layers=24,
        expansion_ratio=4,
        max_seq_len=2048,
        vocab_size=50368,
        layer_norm_epsilon=1e-5,
        attn_config=None,
        tie_word_embeddings=True,
        aliases={
            "num_attention_heads": "n_heads",
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
        },
    )
}
# The values of `attn_config` that are implemented; absent ones are the first.
_ATTENTION: Mapping[str, tuple[Any, ...]] = {
    "alibi": (True,),
    "alibi_bias_max": (8,),
    "qk_ln": (False,),
    "prefix_lm": (False,),
}


@final
@dataclass(frozen=True, kw_only=True)
class MPTConfig(DecoderConfig):
    """MosaicML 2023."""

    activation: str = "gelu"
    norm_eps: float = 1e-5
    norm_bias: bool = False
    tie_word_embeddings: bool = True

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS["mpt"].read(given)
        attention = given["attn_config"] or {}
        if not isinstance(attention, Mapping):
            raise UnsupportedModelError(
                f"attn_config={attention!r} is not supported; give an object"
            )
        for name, allowed in _ATTENTION.items():
            check_is({"model_type": "mpt", name: attention.get(name, allowed[0])}, name, allowed)
        check_is(given, "expansion_ratio", (4,))
        names = dict(embed="d_model", layers="n_layers", heads="n_heads", positions="max_seq_len")
        sizes = plain_sizes({**given, "mlp": None}, **names, mlp="mlp")
        return cls(
            **sizes,
            norm_eps=given["layer_norm_epsilon"],
            tie_word_embeddings=bool(given["tie_word_embeddings"]),
            alibi_slopes=alibi_slopes(sizes["num_heads"]),
            attention_scale=attention.get("softmax_scale"),
            qkv_clip=attention.get("clip_qkv") or None,
        )


@final
class MPTBlock(Block):
    norm_class = LayerNorm
    mlp_class = TwoLayerMLP


@final
class MPT(Decoder):
    block_class = MPTBlock


def _weights(config: MPTConfig) -> dict[str, Weight]:
    layer = "transformer.blocks.{layer}."
    return {
        "embedding": Weight.of("transformer.wte.weight", "v e"),
        "lm_head": Weight.of("lm_head.weight", "e v", "v e"),
        "blocks.attention.wqkv": Weight.of(layer + "attn.Wqkv.weight", "e k x d", "(x k d) e"),
        "blocks.attention.wo": Weight.of(layer + "attn.out_proj.weight", "k g d e", "e (k g d)"),
        "blocks.mlp.up": Weight.of(layer + "ffn.up_proj.weight", "e m", "m e"),
        "blocks.mlp.down": Weight.of(layer + "ffn.down_proj.weight", "m e", "e m"),
        **layer_norm("norm", "transformer.norm_f"),
        **layer_norm("blocks.attention_norm", layer + "norm_1"),
        **layer_norm("blocks.mlp_norm", layer + "norm_2"),
    }


FAMILY = Family(
    fields=_FIELDS, config=MPTConfig, decoder=MPT, weights=_weights, prefix="transformer."
)
