"""GPT-2 and its relatives, and the shapes of GPT-3: layer norms, and MLPs without a gate.

Positions are learned in GPT-2, GPT-BigCode and GPT-Neo, rotate a part of each head in GPT-J and
CodeGen, and are ALiBi's in MPT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self, final

from jaxtyping import Array, Float, Int32

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import (
    DecoderConfig,
    Fields,
    NormKind,
    Residual,
    alibi_slopes,
    check_is,
    plain_sizes,
)
from jaxserve.models.decoder import Decoder
from jaxserve.models.family import Family
from jaxserve.models.layers import activation_of
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.rope import Rope
from jaxserve.models.weights import Tensor, Weight, layer_norm, neighbours, split_qkv

_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
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
    aliases=_ALIASES,
)
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
        aliases=_ALIASES,
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
        aliases=_ALIASES,
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
    "gptj": _GPTJ,
    "codegen": _GPTJ,
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
    ),
}
# CodeGen's tensor of all queries, keys and values has a part for each of this number of devices.
_NUM_PARTS = 4
# The values of `attn_config` that are implemented; absent ones are the first.
_ATTENTION: Mapping[str, tuple[Any, ...]] = {
    "alibi": (True,),
    "alibi_bias_max": (8,),
    "qk_ln": (False,),
    "prefix_lm": (False,),
}


@final
@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of a layer's tensors in checkpoints, and of the last norm."""

    layer: str = "transformer.h.{layer}."
    attention: str = "attn."
    out: str = "attn.out_proj"
    mlp: tuple[str, str] = ("mlp.c_fc", "mlp.c_proj")
    norms: tuple[str, str] = ("ln_1", "ln_2")
    norm: str = "transformer.ln_f"


_GPT2_NAMES, _GPTJ_NAMES = Names(out="attn.c_proj"), Names(mlp=("mlp.fc_in", "mlp.fc_out"))
_NAMES: Mapping[str, Names] = MappingProxyType(
    {
        **dict.fromkeys(("gpt2", "gpt_bigcode"), _GPT2_NAMES),
        "gpt_neo": Names(attention="attn.attention.", out="attn.attention.out_proj"),
        **dict.fromkeys(("gptj", "codegen"), _GPTJ_NAMES),
        "mpt": Names(
            layer="transformer.blocks.{layer}.",
            mlp=("ffn.up_proj", "ffn.down_proj"),
            norms=("norm_1", "norm_2"),
            norm="transformer.norm_f",
        ),
    }
)


@final
@dataclass(frozen=True, kw_only=True)
class GPT2Config(DecoderConfig):
    """Radford et al. 2019; GPT-3 (Brown et al., arXiv:2005.14165) with dense attention.

    GPT-J (Wang and Komatsuzaki 2021), CodeGen (Nijkamp et al., arXiv:2203.13474), MPT (MosaicML
    2023, without biases).
    """

    activation: str = "gelu_new"
    is_gated: bool = False
    norm_kind: NormKind = "layer"
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    qkv_bias: bool = True
    o_bias: bool = True
    mlp_bias: bool = True
    kind: str = "gpt2"  # the `model_type` whose names and layouts checkpoints have

    @property
    def learns_positions(self) -> bool:
        return self.rope is None and self.alibi_slopes is None

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
        kind = given["model_type"]
        given = _FIELDS[kind].read(given)
        if kind == "mpt":
            fields = _mpt(given)
        else:
            fields = {"gpt_neo": _neo, "gptj": _gptj, "codegen": _gptj}.get(kind, _gpt2)(given)
            fields["activation"] = activation_of(given, "activation_function")
        return cls(
            **fields,
            kind=kind,
            norm_eps=given["layer_norm_epsilon"],
            tie_word_embeddings=bool(given["tie_word_embeddings"]),
        )


def _gpt2(given: Mapping[str, Any]) -> dict[str, Any]:
    check_is(given, "scale_attn_weights", (True,))
    check_is(given, "add_cross_attention", (False,))
    if given["model_type"] == "gpt2":
        check_is(given, "scale_attn_by_inverse_layer_idx", (False,))
    return _sizes(given) | ({"num_kv_heads": 1} if given.get("multi_query") else {})


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


def _gptj(given: Mapping[str, Any]) -> dict[str, Any]:
    if given["model_type"] == "codegen" and given["n_head"] % _NUM_PARTS:
        raise UnsupportedModelError(
            f"n_head={given['n_head']} is not supported for 'codegen'; give a multiple of "
            f"{_NUM_PARTS}"
        )
    residual: Residual = "parallel_one_norm"
    return _sizes(given) | dict(
        residual=residual,
        rope=Rope(dim=given["rotary_dim"]),
        qkv_bias=False,
        o_bias=False,
        lm_head_bias=True,
    )


def _mpt(given: Mapping[str, Any]) -> dict[str, Any]:
    attention = given["attn_config"] or {}
    if not isinstance(attention, Mapping):
        raise UnsupportedModelError(f"attn_config={attention!r} is not supported; give an object")
    for name, allowed in _ATTENTION.items():
        check_is({"model_type": "mpt", name: attention.get(name, allowed[0])}, name, allowed)
    check_is(given, "expansion_ratio", (4,))
    names = dict(embed="d_model", layers="n_layers", heads="n_heads", positions="max_seq_len")
    sizes = plain_sizes({**given, "mlp": None}, **names, mlp="mlp")
    return sizes | dict(
        activation="gelu",
        norm_bias=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        alibi_slopes=alibi_slopes(sizes["num_heads"]),
        attention_scale=attention.get("softmax_scale"),
        qkv_clip=attention.get("clip_qkv") or None,
    )


def _sizes(given: Mapping[str, Any]) -> dict[str, Any]:
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
class GPT2(Decoder):
    """A `Decoder` with `positions` [max_position_embeddings, embed], if they are learned."""

    config: GPT2Config  # pyrefly: ignore[bad-override-mutable-attribute]

    def _add_start(self, new: ParamMaker) -> None:
        config = self.config
        if config.learns_positions:
            shape = (config.max_position_embeddings, config.hidden_size)
            self.positions = new.table((None, "embed"), shape)

    def _embed(
        self,
        tokens: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, "tokens embed"]:
        x = self._embedded(tokens, adapter)
        return x + self.positions[...][positions] if self.config.learns_positions else x


def _weights(config: GPT2Config) -> dict[str, Weight]:
    kind, names = config.kind, _NAMES[config.kind]
    layer = names.layer
    attention, out = layer + names.attention, layer + names.out
    up, down = (layer + name for name in names.mlp)

    def matrix(name: str, axes: str, summed: str, outer: str) -> Weight:
        # GPT-2's own checkpoints have inputs first.
        layout = f"{summed} {outer}" if kind == "gpt2" else f"{outer} {summed}"
        return Weight.of(f"{name}.weight", axes, layout)

    return {
        "embedding": Weight.of("transformer.wte.weight", "v e"),
        "positions": Weight.of("transformer.wpe.weight", "p e"),
        "lm_head": Weight.of("lm_head.weight", "e v", "v e"),
        "lm_head_bias": Weight.of("lm_head.bias", "v"),
        **_qkv(config, attention),
        "blocks.attention.wo": matrix(out, "k g d e", "(k g d)", "e"),
        "blocks.attention.bo": Weight.of(out + ".bias"),
        "blocks.mlp.up": matrix(up, "e m", "e", "m"),
        "blocks.mlp.bup": Weight.of(up + ".bias", "m"),
        "blocks.mlp.down": matrix(down, "m e", "m", "e"),
        "blocks.mlp.bdown": Weight.of(down + ".bias"),
        **layer_norm("norm", names.norm),
        **layer_norm("blocks.attention_norm", layer + names.norms[0]),
        **layer_norm("blocks.mlp_norm", layer + names.norms[1]),
    }


def _qkv(config: GPT2Config, attention: str) -> dict[str, Weight]:
    """Return the weights of queries, keys and values; `attention` begins their names."""
    path = "blocks.attention.wqkv"
    if config.kind in ("gpt2", "gpt_bigcode"):
        order, layout = "(k x d)", "(k x d) e"
        if config.kind == "gpt2":
            order, layout = "(x k d)", "e (x k d)"
        return {
            path: Weight.of(attention + "c_attn.weight", "e k x d", layout),
            "blocks.attention.bqkv": Weight.of(attention + "c_attn.bias", "k x d", order),
        }
    if config.kind == "mpt":
        return {path: Weight.of(attention + "Wqkv.weight", "e k x d", "(x k d) e")}
    if config.rope is None:
        return {path: split_qkv(attention, "weight", config.group)}
    order = neighbours(config.rope.dim or config.head_dim, config.head_dim)
    if config.kind == "codegen":
        return {path: _fused_qkv(attention + "qkv_proj.weight", config, order)}
    return {path: split_qkv(attention, "weight", config.group, order=order)}


def _fused_qkv(name: str, config: GPT2Config, order: Mapping[str, Sequence[int]]) -> Weight:
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


def _unread(config: GPT2Config) -> list[str]:
    """Return the tables of positions and masks that GPT-J's and CodeGen's checkpoints may have."""
    layers = range(config.num_layers if config.rope is not None else 0)
    names = "embed_positions", "causal_mask"
    return [f"transformer.h.{layer}.attn.{name}" for layer in layers for name in names]


FAMILY = Family(
    fields=_FIELDS,
    config=GPT2Config,
    decoder=GPT2,
    weights=_weights,
    prefix="transformer.",
    ignored=r".*\.attn\.(attention\.)?(masked_)?bias",
    unread=_unread,
)
