"""GPT-J: parallel attention and MLP after one norm, part of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.models.config import DecoderConfig, Fields, Residual
from jaxserve.models.decoder import Decoder
from jaxserve.models.families.gpt2 import GPT_ALIASES, gpt_sizes
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, TwoLayerMLP, activation_of
from jaxserve.models.norms import LayerNorm
from jaxserve.models.rope import Rope
from jaxserve.models.weights import Weight, layer_norm, neighbours, split_qkv

_FIELDS = {
    "gptj": Fields(
        dict(
            vocab_size=50400,
            n_positions=2048,
            n_embd=4096,
            n_layer=28,
            n_head=16,
            rotary_dim=64,
            n_inner=None,
            activation_function="gelu_new",
            layer_norm_epsilon=1e-5,
            tie_word_embeddings=False,
        ),
        aliases=GPT_ALIASES,
    )
}


@final
@dataclass(frozen=True, kw_only=True)
class GPTJConfig(DecoderConfig):
    """Wang and Komatsuzaki 2021."""

    activation: str = "gelu_new"
    norm_eps: float = 1e-5
    mlp_bias: bool = True
    lm_head_bias: bool = True
    rope: Rope | None = Rope(dim=64)
    residual: Residual = "parallel_one_norm"

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS["gptj"].read(given)
        return cls(
            **gpt_sizes(given),
            activation=activation_of(given, "activation_function"),
            norm_eps=given["layer_norm_epsilon"],
            tie_word_embeddings=bool(given["tie_word_embeddings"]),
            rope=Rope(dim=given["rotary_dim"]),
        )


@final
class GPTJBlock(Block):
    norm_class = LayerNorm
    mlp_class = TwoLayerMLP


@final
class GPTJ(Decoder):
    block_class = GPTJBlock


def _weights(config: GPTJConfig) -> dict[str, Weight]:
    layer = "transformer.h.{layer}."
    assert config.rope is not None
    order = neighbours(config.rope.dim or config.head_dim, config.head_dim)
    return {
        "embedding": Weight.of("transformer.wte.weight", "v e"),
        "lm_head": Weight.of("lm_head.weight", "e v", "v e"),
        "lm_head_bias": Weight.of("lm_head.bias", "v"),
        "blocks.attention.wqkv": split_qkv(layer + "attn.", "weight", config.group, order=order),
        "blocks.attention.wo": Weight.of(layer + "attn.out_proj.weight", "k g d e", "e (k g d)"),
        "blocks.mlp.up": Weight.of(layer + "mlp.fc_in.weight", "e m", "m e"),
        "blocks.mlp.bup": Weight.of(layer + "mlp.fc_in.bias", "m"),
        "blocks.mlp.down": Weight.of(layer + "mlp.fc_out.weight", "m e", "e m"),
        "blocks.mlp.bdown": Weight.of(layer + "mlp.fc_out.bias"),
        **layer_norm("norm", "transformer.ln_f"),
        **layer_norm("blocks.attention_norm", layer + "ln_1"),
    }


FAMILY = Family(
    fields=_FIELDS,
    config=GPTJConfig,
    decoder=GPTJ,
    weights=_weights,
    prefix="transformer.",
    ignored=r".*\.attn\.(masked_)?bias|.*\.attn\.embed_positions",
)
