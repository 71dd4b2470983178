"""Layer norms under Llama's names: StableLM, StarCoder 2, Nemotron, Jais 2, Command R and R7B."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.models.config import DecoderConfig, Fields, NormKind, kinds_in_turn
from jaxserve.models.decoder import Decoder
from jaxserve.models.family import Family
from jaxserve.models.layers import activation_of
from jaxserve.models.llama_form import (
    LAYER,
    ROTARY_FIELDS,
    attention_weights,
    mlp_weights,
    rotary_decoder_fields,
    two_layer_weights,
)
from jaxserve.models.rope import Rope
from jaxserve.models.weights import Tensor, Weight, layer_norm, neighbours

_SHARED = {name: ROTARY_FIELDS[name] for name in ROTARY_FIELDS if name != "rms_norm_eps"}
_COHERE = _SHARED | dict(
    vocab_size=256000,
    hidden_size=8192,
    intermediate_size=22528,
    num_hidden_layers=40,
    num_attention_heads=64,
    max_position_embeddings=8192,
    layer_norm_eps=1e-5,
    logit_scale=0.0625,
    tie_word_embeddings=True,
    attention_bias=False,
)
_FIELDS = {
    "stablelm": Fields.of(
        _SHARED,
        vocab_size=50304,
        hidden_size=2560,
        intermediate_size=6912,
        num_key_value_heads=32,
        max_position_embeddings=4096,
        layer_norm_eps=1e-5,
        partial_rotary_factor=0.25,
        use_qkv_bias=False,
        qk_layernorm=False,
        use_parallel_residual=False,
    ),
    "starcoder2": Fields.of(
        _SHARED,
        vocab_size=49152,
        hidden_size=3072,
        intermediate_size=12288,
        num_hidden_layers=30,
        num_attention_heads=24,
        num_key_value_heads=2,
        hidden_act="gelu_pytorch_tanh",
        max_position_embeddings=4096,
        norm_epsilon=1e-5,
        sliding_window=None,
        use_bias=True,
        tie_word_embeddings=True,
    ),
    "nemotron": Fields.of(
        _SHARED,
        vocab_size=256000,
        hidden_size=6144,
        intermediate_size=24576,
        num_attention_heads=48,
        hidden_act="relu2",
        max_position_embeddings=4096,
        norm_eps=1e-5,
        partial_rotary_factor=0.5,
        attention_bias=False,
        mlp_bias=False,
    ),
    "jais2": Fields.of(
        _SHARED,
        vocab_size=150272,
        hidden_size=3328,
        intermediate_size=26624,
        num_attention_heads=26,
        hidden_act="relu2",
        max_position_embeddings=8192,
        layer_norm_eps=1e-5,
        attention_bias=True,
        mlp_bias=True,
    ),
    "cohere": Fields.of(_COHERE, rope_theta=5e5, use_qk_norm=False, nullable=("use_qk_norm",)),
    "cohere2": Fields.of(
        _COHERE,
        sliding_window=4096,
        sliding_window_pattern=4,
        layer_types=None,
        nullable=("sliding_window",),
    ),
}


@final
@dataclass(frozen=True, kw_only=True)
class StableLMConfig(DecoderConfig):
    """A decoder with layer norms, and a gated or a two-layer MLP."""

    rope: Rope | None = Rope()
    norm_kind: NormKind = "layer"
    mlp_names: tuple[str, str] = ("up_proj", "down_proj")  # in checkpoints, if it is not gated
    # Whether checkpoints have a tensor for the norm of each head, as StableLM, or for all.
    splits_qk_norm: bool = False
    has_neighbours: bool = False  # whether checkpoints rotate neighbouring dimensions

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        kind = given["model_type"]
        given = _FIELDS[kind].read(given)
        if kind == "cohere2":
            given["layer_types"] = given["layer_types"] or kinds_in_turn(
                given["num_hidden_layers"], given["sliding_window_pattern"]
            )
        eps = next(given[name] for name in given if name.endswith(("norm_eps", "norm_epsilon")))
        bias = bool(given.get("attention_bias", given.get("use_bias")))
        activation = activation_of(given, "hidden_act")
        fields = rotary_decoder_fields(
            {**given, "rms_norm_eps": eps},
            given.get("partial_rotary_factor"),
            activations=(activation,),
        )
        fields |= dict(
            activation=activation,
            qkv_bias=bias or bool(given.get("use_qkv_bias")),
            o_bias=bias,
            mlp_bias=bool(given.get("mlp_bias", given.get("use_bias"))),
            is_gated=kind in ("stablelm", "cohere", "cohere2"),
            norm_offset=1.0 if kind == "nemotron" else 0.0,
        )
        if kind == "starcoder2":
            fields["mlp_names"] = ("c_fc", "c_proj")
        if kind == "stablelm":
            fields["layer_qk_norm"] = bool(given["qk_layernorm"])
            fields["splits_qk_norm"] = True
            if given["use_parallel_residual"]:
                fields["residual"] = "parallel_one_norm"
        if kind.startswith("cohere"):
            fields |= _cohere(given)
        return cls(**fields)


def _cohere(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that Command R and R7B have in common with no other one."""
    fields: dict[str, Any] = dict(
        norm_bias=False,
        residual="parallel_one_norm",
        has_neighbours=True,
        logits_scale=float(given["logit_scale"]),
    )
    if given["model_type"] == "cohere":
        return {**fields, "layer_qk_norm": bool(given["use_qk_norm"])}
    # Layers that see the whole context have no positions.
    window = given["sliding_window"]
    rotated = tuple(
        kind == "sliding_attention" and window is not None for kind in given["layer_types"]
    )
    return {**fields, "rotated_layers": rotated}


def _qk_norms(
    config: StableLMConfig, order: Mapping[str, Sequence[int]] | None
) -> dict[str, Weight]:
    """Return the scales of the norms of queries and keys."""
    attention, group = LAYER + "self_attn.", config.group
    if not config.splits_qk_norm:
        names = {"q": ("k g d", "(k g) d"), "k": ("k x d", "(k x) d")}
        return {
            f"blocks.attention.{letter}_norm.scale": Weight(
                axes, (Tensor(f"{attention}{letter}_norm.weight", layout, order=order),)
            )
            for letter, (axes, layout) in names.items()
        }
    heads = [
        Tensor(f"{attention}q_layernorm.norms.{head}.weight", "d", k=head // group, g=head % group)
        for head in range(config.num_heads)
    ]
    keys = [
        Tensor(f"{attention}k_layernorm.norms.{head}.weight", "d", k=head, x=0)
        for head in range(config.num_kv_heads)
    ]
    return {
        "blocks.attention.q_norm.scale": Weight("k g d", tuple(heads)),
        "blocks.attention.k_norm.scale": Weight("k x d", tuple(keys)),
    }


def _weights(config: StableLMConfig) -> dict[str, Weight]:
    assert config.rope is not None
    rotated = config.rope.dim or config.head_dim
    order = neighbours(rotated, config.head_dim) if config.has_neighbours else None
    return {
        **attention_weights(config, order=order),
        **_qk_norms(config, order),
        **(mlp_weights() if config.is_gated else two_layer_weights(*config.mlp_names)),
        **layer_norm("norm", "model.norm"),
        **layer_norm("blocks.attention_norm", LAYER + "input_layernorm"),
        **layer_norm("blocks.mlp_norm", LAYER + "post_attention_layernorm"),
    }


FAMILY = Family(fields=_FIELDS, config=StableLMConfig, decoder=Decoder, weights=_weights)
