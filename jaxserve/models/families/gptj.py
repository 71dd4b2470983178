"""GPT-J and CodeGen: parallel attention and MLP after one norm, part of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig, Fields, Residual
from jaxserve.models.decoder import Decoder
from jaxserve.models.families.gpt2 import GPT_ALIASES, gpt_sizes
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, TwoLayerMLP, activation_of
from jaxserve.models.norms import LayerNorm
from jaxserve.models.rope import Rope
from jaxserve.models.weights import Tensor, Weight, layer_norm, neighbours, split_qkv

_GPTJ = Fields.of(
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
    aliases=GPT_ALIASES,
)
_FIELDS = {"gptj": _GPTJ, "codegen": _GPTJ}
# CodeGen's tensor of all queries, keys and values has a part for each of this number of devices.
_NUM_PARTS = 4


@final
@dataclass(frozen=True, kw_only=True)
class GPTJConfig(DecoderConfig):
    """Wang and Komatsuzaki 2021; CodeGen (Nijkamp et al., arXiv:2203.13474)."""

    activation: str = "gelu_new"
    norm_eps: float = 1e-5
    mlp_bias: bool = True
    lm_head_bias: bool = True
    rope: Rope | None = Rope(dim=64)
    residual: Residual = "parallel_one_norm"
    fuses_qkv: bool = False  # whether checkpoints have one tensor of queries, keys and values

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _GPTJ.read(given)
        fuses_qkv = given["model_type"] == "codegen"
        if fuses_qkv and given["n_head"] % _NUM_PARTS:
            raise UnsupportedModelError(
                f"n_head={given['n_head']} is not supported for 'codegen'; give a multiple of "
                f"{_NUM_PARTS}"
            )
        return cls(
            **gpt_sizes(given),
            activation=activation_of(given, "activation_function"),
            norm_eps=given["layer_norm_epsilon"],
            tie_word_embeddings=bool(given["tie_word_embeddings"]),
            rope=Rope(dim=given["rotary_dim"]),
            fuses_qkv=fuses_qkv,
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
    if config.fuses_qkv:
        qkv = _fused_qkv(layer + "attn.qkv_proj.weight", config, order)
    else:
        qkv = split_qkv(layer + "attn.", "weight", config.group, order=order)
    return {
        "embedding": Weight.of("transformer.wte.weight", "v e"),
        "lm_head": Weight.of("lm_head.weight", "e v", "v e"),
        "lm_head_bias": Weight.of("lm_head.bias", "v"),
        "blocks.attention.wqkv": qkv,
        "blocks.attention.wo": Weight.of(layer + "attn.out_proj.weight", "k g d e", "e (k g d)"),
        "blocks.mlp.up": Weight.of(layer + "mlp.fc_in.weight", "e m", "m e"),
        "blocks.mlp.bup": Weight.of(layer + "mlp.fc_in.bias", "m"),
        "blocks.mlp.down": Weight.of(layer + "mlp.fc_out.weight", "m e", "e m"),
        "blocks.mlp.bdown": Weight.of(layer + "mlp.fc_out.bias"),
        **layer_norm("norm", "transformer.ln_f"),
        **layer_norm("blocks.attention_norm", layer + "ln_1"),
    }


def _fused_qkv(name: str, config: GPTJConfig, order: Mapping[str, Sequence[int]]) -> Weight:
    """Return CodeGen's projection: in each of four parts, queries, values and keys of its heads."""
    heads = config.num_heads // _NUM_PARTS
    size = heads * config.head_dim
    return Weight(
        "e k x d",
        tuple(
            Tensor(
                name,
                "(k x d) e",
                rows=((3 * part + place) * size, 3 * _NUM_PARTS * size),
                order=None if column == 2 else order,
                k=slice(part * heads, (part + 1) * heads),
                x=column,
            )
            for part in range(_NUM_PARTS)
            for place, column in enumerate((0, 2, 1))
        ),
    )


FAMILY = Family(
    fields=_FIELDS,
    config=GPTJConfig,
    decoder=GPTJ,
    weights=_weights,
    prefix="transformer.",
    ignored=r".*\.attn\.(masked_)?bias|.*\.attn\.(embed_positions|causal_mask)",
)
