"""GPT-NeoX and Pythia, Persimmon, Falcon, BLOOM: layer norms, and one tensor of a layer's qkv."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Self, final

from jaxtyping import Array, Float, Int32

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
from jaxserve.models.norms import LayerNorm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.rope import Rope, rope_fields
from jaxserve.models.weights import Weight, layer_norm, two_layer_mlp

_BLOOM_CONTEXT = 2048  # of its training; ALiBi has no limit, and config.json no field
_FIELDS = {
    "gpt_neox": Fields.of(
        vocab_size=50432,
        hidden_size=6144,
        num_hidden_layers=44,
        num_attention_heads=64,
        intermediate_size=24576,
        hidden_act="gelu",
        max_position_embeddings=2048,
        layer_norm_eps=1e-5,
        tie_word_embeddings=False,
        use_parallel_residual=True,
        rope_parameters=None,
        rope_scaling=None,
        rotary_emb_base=1e4,
        rotary_pct=0.25,
        attention_bias=True,
    ),
    "persimmon": Fields.of(
        vocab_size=262144,
        hidden_size=4096,
        intermediate_size=16384,
        num_hidden_layers=36,
        num_attention_heads=64,
        hidden_act="relu2",
        max_position_embeddings=16384,
        layer_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters=None,
        rope_scaling=None,
        rope_theta=1e4,
        partial_rotary_factor=0.5,
        qk_layernorm=True,
    ),
    "falcon": Fields.of(
        vocab_size=65024,
        hidden_size=4544,
        num_hidden_layers=32,
        num_attention_heads=71,
        num_ln_in_parallel_attn=None,
        layer_norm_epsilon=1e-5,
        num_kv_heads=None,
        alibi=False,
        new_decoder_architecture=False,
        multi_query=True,
        parallel_attn=True,
        bias=False,
        max_position_embeddings=2048,
        rope_parameters=None,
        rope_scaling=None,
        rope_theta=1e4,
        ffn_hidden_size=None,
        activation="gelu",
        tie_word_embeddings=True,
        nullable=("alibi", "new_decoder_architecture", "multi_query", "parallel_attn", "bias"),
        aliases={"n_embed": "hidden_size"},
    ),
    "bloom": Fields.of(
        vocab_size=250880,
        hidden_size=64,
        n_layer=2,
        n_head=8,
        layer_norm_epsilon=1e-5,
        apply_residual_connection_post_layernorm=False,
        tie_word_embeddings=True,
        aliases={
            "n_embed": "hidden_size",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
        },
    ),
}


@final
@dataclass(frozen=True, kw_only=True)
class NeoXNames:
    """The names of tensors in checkpoints; those of layers come after `layer`."""

    embedding: str
    layer: str
    norm: str
    attention: str = "self_attention."
    head: str = "lm_head"
    # Of a layer's norms.
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")


_NEOX = NeoXNames(
    embedding="gpt_neox.embed_in",
    layer="gpt_neox.layers.{layer}.",
    attention="attention.",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
)
_PERSIMMON = NeoXNames(
    embedding="model.embed_tokens",
    layer="model.layers.{layer}.",
    attention="self_attn.",
    norm="model.final_layernorm",
)
_FALCON = NeoXNames(
    embedding="transformer.word_embeddings", layer="transformer.h.{layer}.", norm="transformer.ln_f"
)


@final
@dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(DecoderConfig):
    """Black et al., arXiv:2204.06745; Persimmon (Adept 2023), whose heads have layer norms.

    Falcon (Almazrouei et al., arXiv:2311.16867) has grouped queries, or ALiBi as BLOOM
    (arXiv:2211.05100), which normalises embeddings, too.
    """

    activation: str = "gelu"
    is_gated: bool = False
    norm_kind: NormKind = "layer"
    norm_eps: float = 1e-5
    qkv_bias: bool = True
    o_bias: bool = True
    mlp_bias: bool = True
    embedding_norm: bool = False  # whether a norm follows the embedding
    names: NeoXNames = _NEOX

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS[given["model_type"]].read(given)
        eps = next(given[name] for name in given if name.startswith("layer_norm_eps"))
        return cls(
            norm_eps=eps,
            tie_word_embeddings=bool(given["tie_word_embeddings"]),
            **_READERS[given["model_type"]](given),
        )


def _neox(given: Mapping[str, Any]) -> dict[str, Any]:
    rope, bias = rope_fields(given, theta="rotary_emb_base"), bool(given["attention_bias"])
    return _turned(given, rope, given["rotary_pct"]) | dict(
        activation=activation_of(given, "hidden_act"),
        qkv_bias=bias,
        o_bias=bias,
        residual="parallel" if given["use_parallel_residual"] else "in_turn",
    )


def _persimmon(given: Mapping[str, Any]) -> dict[str, Any]:
    return _turned(given, rope_fields(given), given["partial_rotary_factor"]) | dict(
        activation=activation_of(given, "hidden_act"),
        shared_layer_qk_norm=bool(given["qk_layernorm"]),
        names=_PERSIMMON,
    )


def _turned(given: Mapping[str, Any], rope: Mapping[str, Any], share: float) -> dict[str, Any]:
    """Return `plain_sizes` and the rotation of a share of each head, if `rope` has no other."""
    sizes = plain_sizes(given)
    limit, share = sizes["max_position_embeddings"], rope.get("partial_rotary_factor", share)
    turned = Rope.from_hf(rope, limit, dim=int(sizes["head_dim"] * share))
    return sizes | dict(rope=turned, max_position_embeddings=turned.longest_context(limit))


def _bloom(given: Mapping[str, Any]) -> dict[str, Any]:
    check_is(given, "apply_residual_connection_post_layernorm", (False,))
    sizes = plain_sizes(
        {**given, "mlp": None, "positions": _BLOOM_CONTEXT},
        layers="n_layer",
        heads="n_head",
        mlp="mlp",
        positions="positions",
    )
    return dict(
        **sizes,
        activation="gelu_new",
        names=_FALCON,
        alibi_slopes=alibi_slopes(sizes["num_heads"]),
        embedding_norm=True,
    )


def _falcon(given: Mapping[str, Any]) -> dict[str, Any]:
    is_new, bias = bool(given["new_decoder_architecture"]), bool(given["bias"])
    sizes = plain_sizes(given, mlp="ffn_hidden_size")
    head_dim, limit = sizes["head_dim"], sizes["max_position_embeddings"]
    if is_new:
        check_is(given, "parallel_attn", (True,))
        check_is(given, "num_ln_in_parallel_attn", (None, 1, 2))
        sizes["num_kv_heads"] = given["num_kv_heads"] or sizes["num_heads"]
    elif given["multi_query"]:
        sizes["num_kv_heads"] = 1
    if not is_new and given["parallel_attn"]:
        check_is(given, "num_ln_in_parallel_attn", (None, 0, 1))
    residual: Residual = "in_turn"
    if given["parallel_attn"]:
        has_two = is_new and given["num_ln_in_parallel_attn"] in (None, 2)
        residual = "parallel" if has_two else "parallel_one_norm"
    rope = None
    if not given["alibi"]:
        rope = Rope.from_hf(rope_fields(given), limit)
        sizes["max_position_embeddings"] = rope.longest_context(limit)
    return dict(
        **sizes,
        activation=activation_of(given, "activation"),
        rope=rope,
        # Its slopes are scaled as the products of queries and keys are.
        alibi_slopes=tuple(slope * head_dim**-0.5 for slope in alibi_slopes(sizes["num_heads"]))
        if given["alibi"]
        else None,
        residual=residual,
        names=replace(_FALCON, norms=("ln_attn", "ln_mlp")) if residual == "parallel" else _FALCON,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


_READERS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = MappingProxyType(
    {"gpt_neox": _neox, "persimmon": _persimmon, "falcon": _falcon, "bloom": _bloom}
)


@final
class GPTNeoX(Decoder):
    """A `Decoder` with a layer norm `embedding_norm` after the embedding, if the config has it."""

    config: GPTNeoXConfig  # pyrefly: ignore[bad-override-mutable-attribute]

    def _add_start(self, new: ParamMaker) -> None:
        if self.config.embedding_norm:
            self.embedding_norm = LayerNorm(self.config, new)

    def _embed(
        self,
        tokens: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, "tokens embed"]:
        x = self._embedded(tokens, adapter)
        return self.embedding_norm(x) if self.config.embedding_norm else x


def _weights(config: GPTNeoXConfig) -> dict[str, Weight]:
    names, path = config.names, "blocks.attention."
    layer = names.layer
    attention, mlp = layer + names.attention, layer + "mlp."
    return {
        "embedding": Weight.of(f"{names.embedding}.weight", "v e"),
        "lm_head": Weight.of(f"{names.head}.weight", "e v", "v e"),
        f"{path}wqkv": Weight.of(attention + "query_key_value.weight", "e k x d", "(k x d) e"),
        f"{path}bqkv": Weight.of(attention + "query_key_value.bias", "k x d", "(k x d)"),
        f"{path}wo": Weight.of(attention + "dense.weight", "k g d e", "e (k g d)"),
        f"{path}bo": Weight.of(attention + "dense.bias"),
        **two_layer_mlp("blocks.mlp", mlp + "dense_h_to_4h", mlp + "dense_4h_to_h"),
        **layer_norm("embedding_norm", f"{names.embedding}_layernorm"),
        **layer_norm("norm", names.norm),
        **layer_norm(f"{path}q_norm", attention + "q_layernorm"),
        **layer_norm(f"{path}k_norm", attention + "k_layernorm"),
        **layer_norm("blocks.attention_norm", layer + names.norms[0]),
        **layer_norm("blocks.mlp_norm", layer + names.norms[1]),
    }


FAMILY = Family(
    fields=_FIELDS,
    config=GPTNeoXConfig,
    decoder=GPTNeoX,
    weights=_weights,
    prefix=("gpt_neox.", "transformer.", "model."),
    ignored=r".*\.attention\.(masked_)?bias|.*\.(maybe_rotary|rotary_emb)\.inv_freq",
)
