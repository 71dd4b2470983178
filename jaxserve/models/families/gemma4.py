"""Gemma 4's dense text models: heads of two sizes, shared keys and values, embeddings by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast, final

from jaxtyping import Array, Float

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.attention import PaddedAttention, padded_weights
from jaxserve.models.config import (
    DecoderConfig,
    Fields,
    LayerHeads,
    NormPlaces,
    check_is,
    kinds_in_turn,
    plain_sizes,
    windows_by_kind,
)
from jaxserve.models.context import LayerContext
from jaxserve.models.families.gemma import GEMMA_FIELDS, Gemma
from jaxserve.models.family import Family
from jaxserve.models.layer_inputs import LayerInput, LayerInputs, layer_input_weights
from jaxserve.models.layers import Block, activation_of
from jaxserve.models.llama_form import LAYER, attention_weights, mlp_weights
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.rope import Rope
from jaxserve.models.weights import Weight

_FIELDS = {
    "gemma4_text": Fields.of(
        GEMMA_FIELDS,
        vocab_size=262144,
        num_hidden_layers=30,
        global_head_dim=512,
        num_global_key_value_heads=None,
        max_position_embeddings=131072,
        sliding_window=512,
        final_logit_softcapping=None,
        vocab_size_per_layer_input=262144,
        hidden_size_per_layer_input=256,
        attention_k_eq_v=False,
        num_kv_shared_layers=0,
        enable_moe_block=False,
        use_double_wide_mlp=False,
        pad_token_id=0,
    )
}
_ROTATIONS = {
    "sliding_attention": dict(rope_type="default", rope_theta=1e4),
    "full_attention": dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6),
}


@final
@dataclass(frozen=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """Google 2026. `head_dim` and `num_kv_heads` are the larger ones of both kinds of layers."""

    activation: str = "gelu_pytorch_tanh"
    norm_places: NormPlaces = "around"
    tie_word_embeddings: bool = True
    attention_scale: float | None = 1.0
    rope: Rope | None = Rope()
    windowed: LayerHeads
    whole: LayerHeads
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
        kinds = fields["layer_types"] or kinds_in_turn(num_layers, 6)
        kinds = [*kinds[:-1], "full_attention"]  # as transformers decides
        windows = windows_by_kind(kinds, fields["sliding_window"], num_layers)
        windowed = LayerHeads(
            num_kv_heads=fields["num_key_value_heads"], head_dim=fields["head_dim"]
        )
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
        sizes = plain_sizes(fields)
        sizes |= dict(num_kv_heads=most, head_dim=max(windowed.head_dim, whole.head_dim))
        return cls(
            **sizes,
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
) -> LayerHeads:
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
    return LayerHeads(
        num_kv_heads=own.get("num_key_value_heads", fields["num_key_value_heads"]),
        head_dim=own.get("head_dim", fields["head_dim"]),
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


class Gemma4Block(Block):
    """A `Block` that adds the layer's own input, and multiplies by a number."""

    attention_class = PaddedAttention
    is_whole: ClassVar[bool] = False
    is_shared: ClassVar[bool] = False

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        config = cast(Gemma4Config, config)
        heads = config.whole if self.is_whole else config.windowed
        own = replace(heads, is_shared=self.is_shared)
        size = config.intermediate_size * (2 if config.has_wide_mlp and self.is_shared else 1)
        super().__init__(replace(config, layer_heads=own, intermediate_size=size), new)
        self.scale = new.ones((None,), (1,))
        if config.per_layer_size:
            self.own_input = LayerInput(config, new, width=config.per_layer_size)

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        x = super().__call__(x, context)
        if context.layer_input is not None:
            x = x + self.own_input(x, context.layer_input, context.adapter)
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
class Gemma4(Gemma):
    block_class = Gemma4Block
    config: Gemma4Config  # pyrefly: ignore[bad-override-mutable-attribute]

    def _block_class(self, layer: int) -> type[Block]:
        classes = (Gemma4Block, SharedBlock), (WholeBlock, SharedWholeBlock)
        is_shared = self.config.kv_sources[layer] is not None
        return classes[self.config.sliding_windows[layer] is None][is_shared]

    def _add_start(self, new: ParamMaker) -> None:
        vocab, width = self.config.per_layer_vocab, self.config.per_layer_size
        if width:
            self.layer_inputs = LayerInputs(self.config, new, vocab_size=vocab, width=width)


def _weights(config: Gemma4Config) -> dict[str, Weight]:
    names = {
        "attention_end_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_end_norm": "post_feedforward_layernorm",
    }
    return {
        **attention_weights(config),
        **mlp_weights(),
        **padded_weights(LAYER + "self_attn."),
        **{f"blocks.{path}.scale": Weight.of(f"{LAYER}{n}.weight") for path, n in names.items()},
        "blocks.scale": Weight.of(LAYER + "layer_scalar", "x"),
        **layer_input_weights("layer_inputs", "blocks.own_input", LAYER),
    }


def _unread(config: Gemma4Config) -> list[str]:
    """Return the tensors that published checkpoints have for layers with keys of others."""
    shared = [layer for layer, source in enumerate(config.kv_sources) if source is not None]
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    return [f"{LAYER.format(layer=i)}self_attn.{name}.weight" for i in shared for name in names]


FAMILY = Family(
    fields=_FIELDS, config=Gemma4Config, decoder=Gemma4, weights=_weights, unread=_unread
)
