"""GPT-2, GPT-BigCode, GPT-Neo, and the shapes of GPT-3: learned positions and layer norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, final

from jaxtyping import Array, Float, Int32

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig, Fields, check_is, plain_sizes
from jaxserve.models.decoder import Decoder
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, TwoLayerMLP, activation_of
from jaxserve.models.norms import LayerNorm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.weights import Weight, layer_norm, split_qkv

GPT_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_FIELDS = {
    "gpt2": Fields.of(
        vocab_size=50257,
        n_positions=1024,
        n_embd=768,
        n_layer=12,
        n_head=12,
        n_inner=None,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
        tie_word_embeddings=True,
        aliases=GPT_ALIASES,
    ),
    "gpt_bigcode": Fields.of(
        vocab_size=50257,
        n_positions=1024,
        n_embd=768,
        n_layer=12,
        n_head=12,
        n_inner=None,
        activation_function="gelu_pytorch_tanh",
        layer_norm_epsilon=1e-5,
        scale_attn_weights=True,
        multi_query=True,
        add_cross_attention=False,
        tie_word_embeddings=True,
        aliases=GPT_ALIASES,
    ),
    "gpt_neo": Fields.of(
        vocab_size=50257,
        max_position_embeddings=2048,
        hidden_size=2048,
        num_layers=24,
        attention_types=None,
        num_heads=16,
        intermediate_size=None,
        window_size=256,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        tie_word_embeddings=True,
        aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    ),
}
Names = Literal["gpt2", "gpt_bigcode", "gpt_neo"]


@final
@dataclass(frozen=True, kw_only=True)
class GPT2Config(DecoderConfig):
    """Radford et al. 2019; GPT-3 (Brown et al., arXiv:2005.14165) with dense attention."""

    activation: str = "gelu_new"
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    qkv_bias: bool = True
    o_bias: bool = True
    mlp_bias: bool = True
    names: Names = "gpt2"  # whose names and layouts checkpoints have

    @classmethod
    def of_shape(
        cls, *, num_layers: int, hidden_size: int, num_heads: int, **others: Any
    ) -> GPT2Config:
        """Return a configuration of these sizes, with GPT-3's values for the other fields."""
        sizes: dict[str, Any] = dict(
            vocab_size=50257,
            hidden_size=hidden_size,
            intermediate_size=4 * hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden_size // num_heads,
            max_position_embeddings=2048,
        )
        return cls(**{**sizes, **others})

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS[given["model_type"]].read(given)
        if given["model_type"] == "gpt_neo":
            fields = _neo(given)
        else:
            check_is(given, "scale_attn_weights", (True,))
            check_is(given, "add_cross_attention", (False,))
            fields = gpt_sizes(given)
        if given["model_type"] == "gpt2":
            check_is(given, "scale_attn_by_inverse_layer_idx", (False,))
        if given.get("multi_query"):
            fields["num_kv_heads"] = 1
        return cls(
            **fields,
            names=given["model_type"],
            activation=activation_of(given, "activation_function"),
            norm_eps=given["layer_norm_epsilon"],
            tie_word_embeddings=bool(given["tie_word_embeddings"]),
        )


def _neo(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return GPT-Neo's fields: windows in some layers, and products that are not scaled."""
    sizes = plain_sizes(given, layers="num_layers", heads="num_heads")
    pattern = (
        [(["global", "local"], 12)]
        if given["attention_types"] is None
        else (given["attention_types"])
    )
    kinds = [kind for kinds, times in pattern for _ in range(times) for kind in kinds]
    if len(kinds) != sizes["num_layers"] or set(kinds) - {"global", "local"}:
        raise UnsupportedModelError(
            f"attention_types={given['attention_types']} is not supported; give 'global' or "
            f"'local' for each of num_layers={sizes['num_layers']}"
        )
    windows = tuple(given["window_size"] if kind == "local" else None for kind in kinds)
    return {**sizes, "sliding_windows": windows, "attention_scale": 1.0, "qkv_bias": False}


def gpt_sizes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `plain_sizes` by the names in config.json that GPT-2 and GPT-J share."""
    return plain_sizes(
        given,
        embed="n_embd",
        layers="n_layer",
        heads="n_head",
        mlp="n_inner",
        positions="n_positions",
    )


# Table 1 of the ExeGPT paper: the GPT-3 shapes that it runs, by billions of parameters.
GPT3_SHAPES = {
    "gpt3-39b": GPT2Config.of_shape(num_layers=48, hidden_size=8192, num_heads=64),
    "gpt3-101b": GPT2Config.of_shape(num_layers=80, hidden_size=10240, num_heads=80),
    "gpt3-175b": GPT2Config.of_shape(num_layers=96, hidden_size=12288, num_heads=96),
    "gpt3-341b": GPT2Config.of_shape(num_layers=120, hidden_size=15360, num_heads=120),
}


@final
class GPT2Block(Block):
    norm_class = LayerNorm
    mlp_class = TwoLayerMLP


@final
class GPT2(Decoder):
    """A `Decoder` with `positions` [max_position_embeddings, embed]."""

    block_class = GPT2Block

    def _add_start(self, new: ParamMaker) -> None:
        config = self.config
        shape = (config.max_position_embeddings, config.hidden_size)
        self.positions = new.table((None, "embed"), shape)

    def _embed(
        self,
        tokens: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, "tokens embed"]:
        return self._embedded(tokens, adapter) + self.positions[...][positions]


def _weights(config: GPT2Config) -> dict[str, Weight]:
    layer = "transformer.h.{layer}."
    attention = layer + ("attn.attention." if config.names == "gpt_neo" else "attn.")
    out = attention + ("out_proj" if config.names == "gpt_neo" else "c_proj")

    def matrix(name: str, axes: str, summed: str, outer: str) -> Weight:
        # GPT-2's own checkpoints have inputs first.
        layout = f"{summed} {outer}" if config.names == "gpt2" else f"{outer} {summed}"
        return Weight.of(f"{name}.weight", axes, layout)

    order = "(x k d)" if config.names == "gpt2" else "(k x d)"
    if config.names == "gpt_neo":
        qkv = split_qkv(attention, "weight", config.group)
    else:
        qkv = matrix(attention + "c_attn", "e k x d", "e", order)
    return {
        "embedding": Weight.of("transformer.wte.weight", "v e"),
        "positions": Weight.of("transformer.wpe.weight", "p e"),
        "lm_head": Weight.of("lm_head.weight", "e v", "v e"),
        "blocks.attention.wqkv": qkv,
        "blocks.attention.bqkv": Weight.of(attention + "c_attn.bias", "k x d", order),
        "blocks.attention.wo": matrix(out, "k g d e", "(k g d)", "e"),
        "blocks.attention.bo": Weight.of(out + ".bias"),
        "blocks.mlp.up": matrix(layer + "mlp.c_fc", "e m", "e", "m"),
        "blocks.mlp.bup": Weight.of(layer + "mlp.c_fc.bias", "m"),
        "blocks.mlp.down": matrix(layer + "mlp.c_proj", "m e", "m", "e"),
        "blocks.mlp.bdown": Weight.of(layer + "mlp.c_proj.bias"),
        **layer_norm("norm", "transformer.ln_f"),
        **layer_norm("blocks.attention_norm", layer + "ln_1"),
        **layer_norm("blocks.mlp_norm", layer + "ln_2"),
    }


FAMILY = Family(
    fields=_FIELDS,
    config=GPT2Config,
    decoder=GPT2,
    weights=_weights,
    prefix="transformer.",
    ignored=r".*\.attn\.(attention\.)?(masked_)?bias",
)
