"""Gemma 4's dense text models: heads of two sizes, shared keys and values, embeddings by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast, final

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig, Fields, check_is, windows_by_kind
from jaxserve.models.context import LayerContext
from jaxserve.models.decoder import Decoder
from jaxserve.models.families.llama import LAYER, attention_weights, mlp_weights
from jaxserve.models.family import Family
from jaxserve.models.layers import ACTIVATIONS, Block, GatedMLP, activation_of, scaled
from jaxserve.models.linear import Linear, SumsRows
from jaxserve.models.norms import RMSNorm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.projection import projected
from jaxserve.models.rope import Rope
from jaxserve.models.weights import Tensor, Weight, split_qkv
from pallas_kernels import rms_norm

_FIELDS = {
    "gemma4_text": Fields(
        dict(
            vocab_size=262144,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=30,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            global_head_dim=512,
            num_global_key_value_heads=None,
            hidden_activation="gelu_pytorch_tanh",
            max_position_embeddings=131072,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            rope_parameters=None,
            attention_bias=False,
            sliding_window=512,
            layer_types=None,
            final_logit_softcapping=None,
            use_bidirectional_attention=None,
            vocab_size_per_layer_input=262144,
            hidden_size_per_layer_input=256,
            attention_k_eq_v=False,
            num_kv_shared_layers=0,
            enable_moe_block=False,
            use_double_wide_mlp=False,
        ),
        pad_token_id=0,
    )
}
_ROTATIONS = {
    "sliding_attention": dict(rope_type="default", rope_theta=1e4),
    "full_attention": dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6),
}


@final
@dataclass(frozen=True)
class Heads:
    """The sizes of one kind of layers: those with a window, or those without."""

    num_kv_heads: int
    head_dim: int
    has_values: bool  # a projection of values; else they are the keys before norm and rotation


@final
@dataclass(frozen=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """Google 2026. `head_dim` and `num_kv_heads` are the larger ones of both kinds of layers."""

    activation: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    attention_scale: float | None = 1.0
    rope: Rope | None = Rope()
    windowed: Heads
    whole: Heads
    has_wide_mlp: bool = False  # whether layers with shared keys have an MLP of twice the width
    per_layer_vocab: int = 262144
    per_layer_size: int = 256  # the width of a layer's own inputs; 0 for none

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        fields = _FIELDS["gemma4_text"].read(given)
        check_is(fields, "enable_moe_block", (False,))
        check_is(fields, "attention_bias", (False,))
        check_is(fields, "use_bidirectional_attention", (None, "vision"))
        num_layers, max_position = fields["num_hidden_layers"], fields["max_position_embeddings"]
        kinds = list(fields["layer_types"] or ())
        kinds = kinds or [
            "full_attention" if (layer + 1) % 6 == 0 else "sliding_attention"
            for layer in range(num_layers)
        ]
        kinds[-1] = "full_attention"  # as transformers decides
        windows = windows_by_kind(kinds, fields["sliding_window"], num_layers)
        windowed = Heads(fields["num_key_value_heads"], fields["head_dim"], has_values=True)
        whole = _whole_heads(given, fields, kinds)
        most = max(windowed.num_kv_heads, whole.num_kv_heads)
        if most % windowed.num_kv_heads or most % whole.num_kv_heads:
            raise UnsupportedModelError(
                f"num_key_value_heads={windowed.num_kv_heads} and {whole.num_kv_heads} of layers "
                "without a window are not supported; one has to divide the other"
            )
        by_kind = fields["rope_parameters"] or _ROTATIONS
        local_rope, rope = (
            Rope.from_hf(by_kind.get(kind) or _ROTATIONS[kind], max_position, heads.head_dim)
            for kind, heads in (("sliding_attention", windowed), ("full_attention", whole))
        )
        return cls(
            vocab_size=fields["vocab_size"],
            hidden_size=fields["hidden_size"],
            intermediate_size=fields["intermediate_size"],
            num_layers=num_layers,
            num_heads=fields["num_attention_heads"],
            num_kv_heads=most,
            head_dim=max(windowed.head_dim, whole.head_dim),
            max_position_embeddings=max_position,
            activation=activation_of(fields, "hidden_activation"),
            norm_eps=fields["rms_norm_eps"],
            tie_word_embeddings=bool(fields["tie_word_embeddings"]),
            logits_soft_cap=fields["final_logit_softcapping"],
            rope=rope,
            local_rope=local_rope,
            sliding_windows=windows,
            kv_sources=_kv_sources(kinds, fields["num_kv_shared_layers"]),
            windowed=windowed,
            whole=whole,
            has_wide_mlp=bool(fields["use_double_wide_mlp"]),
            per_layer_vocab=fields["vocab_size_per_layer_input"],
            per_layer_size=fields["hidden_size_per_layer_input"],
        )

    def part(self, layers: range) -> Self:
        if len(layers) < self.num_layers:
            raise UnsupportedModelError(
                "stages are not supported for Gemma 4, whose layers read tokens and the keys of "
                "other layers; omit the stages, or pass make_mesh(tensor=2)"
            )
        return self


def _whole_heads(
    given: Mapping[str, Any], fields: Mapping[str, Any], kinds: Sequence[str]
) -> Heads:
    """Return the sizes of layers without a window; transformers 5 writes them for each layer."""
    own: dict[str, Any] = {"head_dim": fields["global_head_dim"]}
    is_shared = bool(fields["attention_k_eq_v"])
    if is_shared and fields["num_global_key_value_heads"] is not None:
        own["num_key_value_heads"] = fields["num_global_key_value_heads"]
    if "per_layer_config" in given:
        by_layer = {int(layer): each for layer, each in (given["per_layer_config"] or {}).items()}
        whole = {layer for layer, kind in enumerate(kinds) if kind == "full_attention"}
        own = next(iter(by_layer.values()), {})
        known = set(own) <= {"head_dim", "num_key_value_heads"}
        if by_layer and not (
            known and set(by_layer) == whole and all(each == own for each in by_layer.values())
        ):
            raise UnsupportedModelError(
                f"per_layer_config={given['per_layer_config']} is not supported; give head_dim and "
                "num_key_value_heads, the same for every layer of full_attention and for no other"
            )
    return Heads(
        own.get("num_key_value_heads", fields["num_key_value_heads"]),
        own.get("head_dim", fields["head_dim"]),
        has_values=not is_shared,
    )


def _kv_sources(kinds: Sequence[str], num_shared: int) -> tuple[int | None, ...]:
    """Return the last layer of each layer's kind that is not among the last `num_shared`."""
    num_own = len(kinds) - num_shared
    last = {kind: layer for layer, kind in enumerate(kinds[:num_own])}
    if set(kinds) != set(last):
        raise UnsupportedModelError(
            f"num_kv_shared_layers={num_shared} is not supported for layer_types={list(kinds)}; "
            "leave a layer of each type with its own keys and values"
        )
    return tuple(None if i < num_own else last[kind] for i, kind in enumerate(kinds))


@final
class HeadNorm(SumsRows):
    """Root-mean-square norm of heads of `head_dim`; `scale` [head_dim], or none."""

    def __init__(self, head_dim: int, eps: float, new: ParamMaker | None):
        self.scale = None if new is None else new.ones((None,), (head_dim,))
        self.eps = eps

    def __call__(
        self, x: Float[Array, "tokens kv_heads columns head_dim"]
    ) -> Float[Array, "tokens kv_heads columns head_dim"]:
        scale = jnp.ones(x.shape[-1:], x.dtype) if self.scale is None else self.scale[...]
        return rms_norm(x, scale, eps=self.eps, implementation=self.row_kernels)


@final
class Gemma4Attention(SumsRows):
    """Attention whose queries, keys and values have norms, padded to the head_dim of the cache.

    wqkv  [embed, kv_heads, group + 2, head_dim]   or wqk without values, or wq of shared keys
    wo    [kv_heads, group, head_dim, embed]
    """

    def __init__(self, config: Gemma4Config, new: ParamMaker, heads: Heads, *, is_shared: bool):
        self.heads, self.is_shared, self.padded_dim = heads, is_shared, config.head_dim
        kv_heads, head_dim, eps = heads.num_kv_heads, heads.head_dim, config.norm_eps
        self.group = group = config.num_heads // kv_heads
        axes, embed = ("kv_heads", None, None), config.hidden_size
        columns = group + (0 if is_shared else 1 + heads.has_values)
        weight = new.weight(("embed", *axes), (embed, kv_heads, columns, head_dim))
        if is_shared:
            self.wq = weight
        elif heads.has_values:
            self.wqkv = weight
        else:
            self.wqk = weight
        self.wo = new.weight((*axes, "embed"), (kv_heads, group, head_dim, embed), num_in=3)
        self.q_norm = HeadNorm(head_dim, eps, new)
        if not is_shared:
            self.k_norm = HeadNorm(head_dim, eps, new)
            self.v_norm = HeadNorm(head_dim, eps, None)

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        heads, group, kernels = self.heads, self.group, self.row_kernels
        weight = self.wq if self.is_shared else self.wqkv if heads.has_values else self.wqk
        qkv = projected(Linear(weight, row_kernels=kernels), x, context.adapter)
        q = self.q_norm(qkv[:, :, :group])
        if self.is_shared:
            out = context.attend_shared(self._padded(q), scale=1.0)
        else:
            k, v = qkv[:, :, group : group + 1], qkv[:, :, -1:]
            qkv = jnp.concatenate([q, self.k_norm(k), self.v_norm(v)], axis=2)
            out = context.attend(self._padded(qkv), scale=1.0, soft_cap=None)
        out = out[..., : heads.head_dim].reshape(-1, heads.num_kv_heads, group, heads.head_dim)
        return projected(Linear(self.wo, row_kernels=kernels), out, context.adapter)

    def _padded(
        self, qkv: Float[Array, "tokens kv_heads columns head_dim"]
    ) -> Float[Array, "tokens kv_heads columns padded_dim"]:
        return jnp.pad(qkv, ((0, 0),) * 3 + ((0, self.padded_dim - qkv.shape[-1]),))


class Gemma4Block(Block):
    """Attention and MLP between norms, then the layer's own input, times a number."""

    norm_class = RMSNorm
    mlp_class = GatedMLP
    is_whole: ClassVar[bool] = False
    is_shared: ClassVar[bool] = False

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        nnx.Module.__init__(self)  # not `Block`'s, whose attention has other sizes
        config = cast(Gemma4Config, config)
        width, embed = config.per_layer_size, config.hidden_size
        heads = config.whole if self.is_whole else config.windowed
        attention = Gemma4Attention(config, new, heads, is_shared=self.is_shared)
        if self.is_whole:
            self.whole_attention = attention
        else:
            self.window_attention = attention
        wide = 2 if config.has_wide_mlp and self.is_shared else 1
        self.mlp = GatedMLP(replace(config, intermediate_size=wide * config.intermediate_size), new)
        self.attention_norm = self.norm_class(config, new)
        self.attention_end_norm = RMSNorm(config, new)
        self.mlp_norm = self.norm_class(config, new)
        self.mlp_end_norm = RMSNorm(config, new)
        self.scale = new.ones((None,), (1,))
        self.activation = config.activation
        if width:
            self.input_gate = new.weight(("embed", None), (embed, width))
            self.input_out = new.weight((None, "embed"), (width, embed))
            self.input_norm = RMSNorm(config, new)

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        attention = self.whole_attention if self.is_whole else self.window_attention
        x = x + self.attention_end_norm(attention(self.attention_norm(x), context))
        x = x + self.mlp_end_norm(self.mlp(self.mlp_norm(x), context))
        if context.layer_input is not None:
            gate = Linear(self.input_gate)(x, context.adapter)
            gated = ACTIVATIONS[self.activation](gate) * context.layer_input
            x = x + self.input_norm(Linear(self.input_out)(gated, context.adapter))
        return x * self.scale[...]


@final
class SharedBlock(Gemma4Block):
    is_shared = True


@final
class WholeBlock(Gemma4Block):
    is_whole = True


@final
class SharedWholeBlock(Gemma4Block):
    is_whole = is_shared = True


@final
class Gemma4(Decoder):
    """A `Decoder` whose embeddings are multiplied by sqrt(embed), with inputs of each layer.

    per_layer_embedding    [per_layer_vocab, layers * width]
    per_layer_projection   [embed, layers * width]
    per_layer_norm         [width]
    """

    block_class = Gemma4Block

    def _block_class(self, layer: int) -> type[Block]:
        config = self.config
        classes = (Gemma4Block, SharedBlock), (WholeBlock, SharedWholeBlock)
        is_shared = config.kv_sources[layer] is not None
        return classes[config.sliding_windows[layer] is None][is_shared]

    def _add_start(self, new: ParamMaker) -> None:
        config = cast(Gemma4Config, self.config)
        if not config.per_layer_size:
            return
        columns, vocab = config.num_layers * config.per_layer_size, config.per_layer_vocab
        self.per_layer_embedding = new.weight((None, None), (vocab, columns), transposed=True)
        self.per_layer_projection = new.weight(("embed", None), (config.hidden_size, columns))
        self.per_layer_norm = HeadNorm(config.per_layer_size, config.norm_eps, new)

    def _embed(
        self,
        tokens: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, "tokens embed"]:
        x = self._embedded(tokens, adapter)
        return x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)

    def _layer_inputs(
        self,
        tokens: Int32[Array, " tokens"] | Float[Array, "tokens embed"],
        x: Float[Array, "tokens embed"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Sequence[Float[Array, "tokens width"] | None]:
        config = cast(Gemma4Config, self.config)
        width = config.per_layer_size
        if not width:
            return super()._layer_inputs(tokens, x, adapter)
        shape = (len(x), 1, config.num_layers, width)
        known = Linear(self.per_layer_embedding).rows(tokens, adapter, x.dtype)
        known = known.reshape(shape) * jnp.asarray(width**0.5, x.dtype)
        seen = scaled(Linear(self.per_layer_projection)(x, adapter), config.hidden_size**-0.5)
        both = scaled(self.per_layer_norm(seen.reshape(shape)) + known, 2**-0.5)
        return [both[:, 0, layer] for layer in range(config.num_layers)]


def _weights(config: Gemma4Config) -> dict[str, Weight]:
    attention = LAYER + "self_attn."
    weights = attention_weights(config) | mlp_weights()
    for name, heads in (("window_attention", config.windowed), ("whole_attention", config.whole)):
        group = config.num_heads // heads.num_kv_heads
        q, k = (
            Tensor(f"{attention}{letter}_proj.weight", "(k x d) e", x=part)
            for letter, part in (("q", slice(0, group)), ("k", slice(group, group + 1)))
        )
        weights |= {
            f"blocks.{name}.wqkv": split_qkv(attention, "weight", group),
            f"blocks.{name}.wqk": Weight("e k x d", (q, k)),
            f"blocks.{name}.wq": Weight("e k x d", (q,)),
            f"blocks.{name}.wo": weights["blocks.attention.wo"],
            f"blocks.{name}.q_norm.scale": Weight.of(attention + "q_norm.weight", "d"),
            f"blocks.{name}.k_norm.scale": Weight.of(attention + "k_norm.weight", "d"),
        }
    names = {
        "attention_end_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_end_norm": "post_feedforward_layernorm",
        "input_norm": "post_per_layer_input_norm",
    }
    return weights | {
        **{f"blocks.{path}.scale": Weight.of(f"{LAYER}{n}.weight") for path, n in names.items()},
        "blocks.scale": Weight.of(LAYER + "layer_scalar", "x"),
        "blocks.input_gate": Weight.of(LAYER + "per_layer_input_gate.weight", "e w", "w e"),
        "blocks.input_out": Weight.of(LAYER + "per_layer_projection.weight", "w e", "e w"),
        "per_layer_embedding": Weight.of("model.embed_tokens_per_layer.weight", "v w"),
        "per_layer_projection": Weight.of("model.per_layer_model_projection.weight", "e w", "w e"),
        "per_layer_norm.scale": Weight.of("model.per_layer_projection_norm.weight", "d"),
    }


def _unread(config: Gemma4Config) -> list[str]:
    """Return the tensors that published checkpoints have for layers with keys of others."""
    shared = (layer for layer, source in enumerate(config.kv_sources) if source is not None)
    return [
        f"{LAYER.format(layer=layer)}self_attn.{name}.weight"
        for layer in shared
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    ]


FAMILY = Family(
    fields=_FIELDS,
    config=Gemma4Config,
    decoder=Gemma4,
    weights=_weights,
    unread=_unread,
)
