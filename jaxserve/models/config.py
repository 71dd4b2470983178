"""The configuration that all decoders share: frozen, hashable, read from a config.json."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, Self, TypeVar, final, get_args

from jax.sharding import Mesh

from jaxserve.core.errors import InvalidConfigError, UnsupportedModelError
from jaxserve.core.options import DTYPES
from jaxserve.models.pooling import Labels, Pooling
from jaxserve.models.recurrence import Recurrence
from jaxserve.models.rope import Rope
from jaxserve.models.routing import ExpertsConfig
from jaxserve.sharding import check_tensor_axis

# The form of a layer's memory of a sequence: keys and values in pages, a state in its slot, both
# (if all layers of the model have both), or none in a layer that is only an MLP.
LayerKind = Literal["attention", "recurrent", "both", "mlp"]
# The form of a layer's MLP: one for all tokens, or a mixture of experts.
MLPKind = Literal["dense", "experts"]
Residual = Literal["in_turn", "parallel", "parallel_one_norm"]
# The norms of a layer: with a scale, as in Llama, of mean and variance, or that without parameters.
NormKind = Literal["rms", "layer", "bare_layer"]
NormPlaces = Literal["before", "around", "after"]
# The fields of a configuration that have a value for each layer, and what the values are.
BY_LAYER: Mapping[str, str] = MappingProxyType(
    {
        "sliding_windows": "sliding windows",
        "attention_chunks": "attention chunks",
        "rotated_layers": "flags of rotation",
        "layer_kinds": "kinds of layers",
        "mlp_kinds": "kinds of MLPs",
        "kv_sources": "sources of keys",
    }
)


@final
@dataclass(frozen=True, kw_only=True)
class QueryGrowth:
    """The factor 1 + beta * ln(1 + floor((position + offset) / period)) of queries.

    It keeps attention sharp in long contexts (Nakanishi, arXiv:2501.19399, section 3).
    """

    beta: float
    period: int
    offset: int = 0


@final
@dataclass(frozen=True, kw_only=True)
class Latents:
    """The sizes of latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Attributes:
      query_rank: the size of a token's queries before they become those of heads; None if they do
        not have one.
      latent_rank: the size of a token's keys and values before they become those of heads.
      value_dim: the size of a value; in the cache it is padded to that of a key.
    """

    query_rank: int | None
    latent_rank: int
    value_dim: int


@final
@dataclass(frozen=True, kw_only=True)
class LayerHeads:
    """The heads of a layer in a model whose layers have heads of differing sizes.

    Attributes:
      has_values: whether there is a projection of values; else they are the keys, before their norm
        and rotation.
      is_shared: whether keys and values are those of another layer (`DecoderConfig.kv_sources`).
    """

    num_kv_heads: int
    head_dim: int
    has_values: bool = True
    is_shared: bool = False


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The fields that the engine, the cache and the shared layers read; families add their own.

    Attributes:
      intermediate_size: the inner size of a dense MLP.
      dtype: of parameters, activations and, by default, of the KV cache; one of `DTYPES`. A
        checkpoint's own dtype does not matter: `load_model` sets this one.
      max_position_embeddings: the longest context that the model was made for, in tokens, including
        the extension by its rotary embedding's scaling.
      norm_bias: whether layer norms have biases.
      norm_places: whether norms are before attention and MLP, after them, or on both sides.
      residual: how attention and MLP join the residual stream: one after the other, side by side
        with a norm each, or side by side behind one norm.
      residual_scale: the factor of what attention and MLP, one after the other, add to it.
      embedding_scale: the factor of the tokens' embeddings.
      is_gated: whether a dense MLP has a gate.
      qkv_bias, o_bias, mlp_bias, lm_head_bias: whether these projections have biases.
      qkv_clip: the largest magnitude of queries, keys and values, after norms; None for no limit.
      qk_norm: whether queries and keys have an RMS norm over head_dim, before the rotation.
      wide_qk_norm: whether they have one over all heads together instead.
      rotates_before_norm: whether the rotation comes before these norms instead.
      attention_gate: whether attention's outputs are multiplied by the sigmoid of a projection.
      unit_qk_norm: whether queries and keys have an RMS norm over head_dim without a scale.
      has_sinks: whether each query head has a logit that joins the softmax, without a value.
      layer_qk_norm: whether they have a layer norm over head_dim instead, with scales of each head.
      shared_layer_qk_norm: whether they have one with a scale and a bias that all heads share.
      attention_scale: the factor of the attention logits; None is 1 / sqrt(head_dim).
      query_growth: a factor of the rotated queries that grows with the position; None for none.
      latents: the sizes of `LatentAttention`; None for a model without it.
      layer_heads: the heads of one layer's `PaddedAttention`; None for a model without it.
      logits_scale: the factor of the logits; None for no scaling.
      alibi_slopes: by how much attention logits fall with each token of distance, for each query
        head; None for models without ALiBi (`alibi_slopes`).
      attention_soft_cap, logits_soft_cap: x becomes cap * tanh(x / cap); None for no cap.
      local_rope: the rotary embedding of layers with a sliding window, if it differs.
      sliding_windows: the window of each layer, tokens; None is full attention, the default.
      attention_chunks: the chunk of each layer, tokens: a token sees those of its own chunk of the
        sequence only; None is full attention, the default.
      kv_sources: the earlier layer of equal kind whose keys and values each layer reads; None for
        a layer with its own, the default.
      rotated_layers: whether each layer rotates queries and keys; all do by default.
      recurrence: the states of recurrent layers; None for a model without any.
      experts: the mixture of experts of layers that have one; None for a model without any.
      labels: what the model scores; None for a model without labels.
      pooling: how texts become embeddings.
      generates: whether the logits are those of tokens. A classifier, and a checkpoint without a
        head, generate nothing; their `logits`, by the embedding, have no meaning.
      decoder_start_token_id: the first token of an encoder-decoder model's answers; None for a
        model without an encoder.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"
    max_position_embeddings: int = 2048
    activation: str = "silu"  # the activation of the MLP, one of `layers.ACTIVATIONS`
    norm_eps: float = 1e-6  # the number that is added to the variance (RMS and layer norms)
    norm_offset: float = 0.0  # the number that is added to an RMS norm's scale (1 in Gemma)
    norm_bias: bool = True
    norm_kind: NormKind = "rms"
    norm_places: NormPlaces = "before"
    residual: Residual = "in_turn"
    residual_scale: float = 1.0
    embedding_scale: float = 1.0
    is_gated: bool = True
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    qkv_clip: float | None = None
    qk_norm: bool = False
    wide_qk_norm: bool = False
    rotates_before_norm: bool = False
    layer_qk_norm: bool = False
    shared_layer_qk_norm: bool = False
    attention_gate: bool = False
    unit_qk_norm: bool = False
    has_sinks: bool = False
    attention_scale: float | None = None
    query_growth: QueryGrowth | None = None
    latents: Latents | None = None
    layer_heads: LayerHeads | None = None
    logits_scale: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    rope: Rope | None = None  # the rotary embedding; None for learned positions
    local_rope: Rope | None = None
    sliding_windows: tuple[int | None, ...] = ()
    attention_chunks: tuple[int | None, ...] = ()
    kv_sources: tuple[int | None, ...] = ()
    rotated_layers: tuple[bool, ...] = ()
    layer_kinds: tuple[LayerKind, ...] = ()  # the kind of each layer; all have attention by default
    # The kind of each layer's MLP; by default all have experts if the model has any.
    mlp_kinds: tuple[MLPKind, ...] = ()
    recurrence: Recurrence | None = None
    experts: ExpertsConfig | None = None
    decoder_start_token_id: int | None = None
    labels: Labels | None = None
    pooling: Pooling = Pooling()
    generates: bool = True

    def __post_init__(self) -> None:
        by_layer: dict[str, Any] = dict.fromkeys(BY_LAYER) | dict(
            rotated_layers=True,
            layer_kinds="attention",
            mlp_kinds="dense" if self.experts is None else "experts",
        )
        for name, default in by_layer.items():
            if not getattr(self, name):
                object.__setattr__(self, name, (default,) * self.num_layers)
        for name in _SIZES:
            value = getattr(self, name)
            if value < 1:
                raise UnsupportedModelError(f"{name}={value} must be at least 1")
        if self.dtype not in DTYPES:
            raise UnsupportedModelError(f"dtype={self.dtype!r} is not supported; give {DTYPES}")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        for rope in (self.rope, self.local_rope):
            dim = self.head_dim if rope is None else rope.dim or self.head_dim
            if rope is not None and (dim % 2 or dim > self.head_dim):
                raise UnsupportedModelError(
                    f"{dim} rotated dimensions of head_dim={self.head_dim}: RoPE needs an even "
                    "number, at most head_dim"
                )
            if rope is not None and rope.num_factors not in (None, dim // 2):
                raise UnsupportedModelError(
                    f"longrope with {rope.num_factors} factors is not supported for {dim} rotated "
                    f"dimensions; give {dim // 2} short_factor and as many long_factor"
                )
        for name, what in BY_LAYER.items():
            values = getattr(self, name)
            if len(values) != self.num_layers:
                raise UnsupportedModelError(f"{len(values)} {what} for {self.num_layers} layers")
        if "both" in self.layer_kinds and set(self.layer_kinds) != {"both"}:
            raise UnsupportedModelError(
                "layer_kinds has 'both' in some layers only; give it for all layers"
            )
        if self.num_recurrent_layers and self.recurrence is None:
            raise UnsupportedModelError(
                "layer_kinds has recurrent layers and recurrence is missing; pass their sizes"
            )
        if "experts" in self.mlp_kinds and self.experts is None:
            raise UnsupportedModelError(
                "mlp_kinds has mixtures of experts and experts is missing; pass their sizes"
            )

    @property
    def has_qk_norm(self) -> bool:
        kinds = self.qk_norm, self.wide_qk_norm, self.layer_qk_norm, self.unit_qk_norm
        return any(kinds) or self.shared_layer_qk_norm

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def layer_ropes(self) -> tuple[Rope | None, ...]:
        """The rotary embedding of each layer; None for a layer without one."""
        local = self.local_rope or self.rope
        layers = zip(self.sliding_windows, self.rotated_layers, strict=True)
        return tuple(
            None if not is_rotated else self.rope if window is None else local
            for window, is_rotated in layers
        )

    @property
    def num_mlp_parts(self) -> int:
        """Number of parts into which a mesh can divide each MLP: inner sizes, and experts."""
        parts = [self.intermediate_size] if "dense" in self.mlp_kinds else []
        if self.experts is not None and "experts" in self.mlp_kinds:
            parts += [self.experts.num, self.experts.shared_size or 0]
        return math.gcd(*parts)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have one kind, window and rotary embedding, as a scan requires."""
        kinds = zip(self.layer_kinds, self.mlp_kinds, self.kv_sources, strict=True)
        seen = zip(self.sliding_windows, self.attention_chunks, strict=True)
        layers = zip(kinds, seen, self.layer_ropes, strict=True)
        return len(set(layers)) == 1

    @property
    def num_attention_layers(self) -> int:
        """Number of layers of attention with their own keys and values."""
        has_attention = sum(kind in ("attention", "both") for kind in self.layer_kinds)
        return has_attention - sum(source is not None for source in self.kv_sources)

    @property
    def num_recurrent_layers(self) -> int:
        return sum(kind in ("recurrent", "both") for kind in self.layer_kinds)

    @property
    def places(self) -> tuple[int, ...]:
        """The number of each layer's memory among those of its kind."""
        counts = dict.fromkeys(get_args(LayerKind), 0)
        places: list[int] = []
        for kind, source in zip(self.layer_kinds, self.kv_sources, strict=True):
            places.append(counts[kind] if source is None else places[source])
            counts[kind] += source is None
        return tuple(places)

    @property
    def default_context(self) -> int:
        """The context in tokens of a runtime whose options do not set one."""
        return self.max_position_embeddings

    @property
    def output_size(self) -> int:
        """The width of the hidden states after the last layer."""
        return self.hidden_size

    def without_token_head(self, labels: Labels | None = None) -> Self:
        """Return the configuration of the model without its head, or with one for labels."""
        return replace(
            self, labels=labels, generates=False, tie_word_embeddings=True, lm_head_bias=False
        )

    @property
    def has_encoder(self) -> bool:
        return self.decoder_start_token_id is not None

    @property
    def down_dtype(self) -> str | None:
        """The dtype of the last weight of an MLP, if it is not `dtype`."""
        return None

    def fitted_to(self, shapes: Mapping[str, tuple[int, ...]]) -> Self:
        """Return the configuration of a checkpoint with tensors of these names and shapes.

        For facts that config.json does not state.
        """
        if self.experts is None:
            return self
        experts = self.experts.fitted_to(shapes, self.hidden_size)
        return replace(self, experts=experts)

    def for_context(self, max_context: int) -> Self:
        """Return the configuration for sequences of at most `max_context` tokens."""
        ropes = (self.rope, self.local_rope)
        rope, local_rope = (each and each.for_context(max_context) for each in ropes)
        return replace(self, rope=rope, local_rope=local_rope)

    def part(self, layers: range) -> Self:
        """Return the configuration of a part of the model, with some of the layers."""
        own = {name: getattr(self, name)[layers.start : layers.stop] for name in BY_LAYER}
        return replace(self, num_layers=len(layers), **own)

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        """Read config.json, given as a dictionary, as transformers 4 or 5 writes it.

        Raises:
          UnsupportedModelError: naming what is given and what is supported.
        """
        raise NotImplementedError


@final
@dataclass(frozen=True)
class Fields:
    """The fields of a config.json that a family reads, as their class in transformers has them.

    Attributes:
      nullable: fields that may be null, in addition to those whose default is null.
      aliases: other names of fields; a value under one precedes the field's own.
    """

    defaults: Mapping[str, Any]  # the value of each absent field
    nullable: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    pad_token_id: int | None = None  # the same of this field, which classifiers alone read

    @classmethod
    def of(
        cls,
        *shared: Mapping[str, Any],
        without: Collection[str] = (),
        nullable: tuple[str, ...] = (),
        aliases: Mapping[str, str] = MappingProxyType({}),
        pad_token_id: int | None = None,
        **own: Any,
    ) -> Self:
        """Return the fields of several tables, except some, and those of this family alone."""
        known = {name: value for table in (*shared, own) for name, value in table.items()}
        defaults = {name: value for name, value in known.items() if name not in without}
        return cls(defaults, nullable, aliases, pad_token_id)

    def read(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return `model_type` and all values; raise UnsupportedModelError for null fields."""
        found = {name: given.get(name, default) for name, default in self.defaults.items()}
        found |= {name: given[alias] for alias, name in self.aliases.items() if alias in given}
        nulls = [
            name
            for name, value in found.items()
            if value is None and self.defaults[name] is not None and name not in self.nullable
        ]
        if nulls:
            raise UnsupportedModelError(
                f"config.json lacks values of {nulls}, which are null and which "
                f"{given['model_type']!r} needs; omit a field to have its default"
            )
        return {"model_type": given["model_type"], **found}


def check_sizes(given: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError if a size in config.json is not a whole number, or absurd."""
    for name, (least, most) in _RANGES.items():
        value = given.get(name)
        is_whole = hasattr(value, "__index__") and not isinstance(value, bool)
        if value is not None and not (is_whole and least <= value <= most):
            raise UnsupportedModelError(
                f"{name}={value!r} is not supported; a model has a whole number of {least} to "
                f"{most} there"
            )


def plain_sizes(
    given: Mapping[str, Any],  # the result of `Fields.read`
    *,
    embed: str = "hidden_size",
    layers: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
    mlp: str = "intermediate_size",
    positions: str = "max_position_embeddings",
) -> dict[str, Any]:
    """Return the sizes of a decoder without grouped queries, with head_dim = hidden size / heads.

    The other arguments are the names of the fields. A null MLP size is four times the hidden size.
    """
    hidden_size, num_heads = given[embed], given[heads]
    return dict(
        vocab_size=given["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=given[mlp] or 4 * hidden_size,
        num_layers=given[layers],
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=given[positions],
    )


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the slopes of Press et al., arXiv:2108.12409, section 3.

    Heads beyond a power of two have every second slope of twice as many heads.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    between = [2 ** (-8 * (head + 0.5) / power) for head in range(num_heads - power)]
    return (*slopes, *between)


def check_is(given: Mapping[str, Any], name: str, allowed: Sequence[Any]) -> None:
    """Raise UnsupportedModelError if a field has a value that is not allowed."""
    if given[name] not in allowed:
        raise UnsupportedModelError(
            f"{name}={given[name]!r} is not supported for {given['model_type']!r}; only "
            f"{' and '.join(map(repr, allowed))} {'is' if len(allowed) == 1 else 'are'}"
        )


def kinds_in_turn(num_layers: int, every: int, kind: str = "sliding_attention") -> list[str]:
    """Return `layer_types` in which each `every`-th layer sees the whole context."""
    return [kind if (layer + 1) % every else "full_attention" for layer in range(num_layers)]


def windows_by_kind(
    kinds: Sequence[str], window: int | None, num_layers: int
) -> tuple[int | None, ...]:
    """Return each layer's window by `layer_types`; raise UnsupportedModelError if unknown."""
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != num_layers:
        raise UnsupportedModelError(
            f"layer_types={list(kinds)} is not supported; give 'full_attention' or "
            f"'sliding_attention' for each of the {num_layers} layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


_Kind = TypeVar("_Kind")
_FORMER_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def kinds_by_name(
    given: Sequence[str], by_name: Mapping[str, _Kind], num_layers: int
) -> tuple[_Kind, ...]:
    """Return each layer's kind by `layer_types`; raise UnsupportedModelError if unknown.

    Names of transformers 4 are read as those of 5.
    """
    given = [_FORMER_KINDS.get(kind, kind) for kind in given]
    if not set(given) <= set(by_name) or len(given) != num_layers:
        raise UnsupportedModelError(
            f"layer_types={list(given)} is not supported; give one of {tuple(by_name)} for each of "
            f"the {num_layers} layers"
        )
    return tuple(by_name[kind] for kind in given)


def check_fits(mesh: Mesh, config: DecoderConfig) -> None:
    """Raise InvalidConfigError if `mesh` does not divide the model, naming sizes that would."""
    if not config.num_attention_layers:  # channels of recurrent layers need not be divided
        return
    try:
        check_tensor_axis(
            mesh,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            num_mlp_parts=config.num_mlp_parts,
        )
    except ValueError as error:
        raise InvalidConfigError(str(error)) from error


# Lowest and highest sizes in a config.json, by their names there. The highest are above those of
# any model; a model of these sizes can still be laid out, to be compared with its checkpoint.
_RANGES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), (1, 1 << 10)),
    **dict.fromkeys(("num_layers", "num_decoder_layers"), (1, 1 << 10)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0, 1 << 12)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), (1, 1 << 16)),
    **dict.fromkeys(("num_heads", "n_head", "head_dim", "d_kv"), (1, 1 << 16)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), (1, 1 << 20)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), (1, 1 << 24)),
    **dict.fromkeys(("shared_expert_intermediate_size", "intermediate_size_mlp"), (1, 1 << 24)),
    **dict.fromkeys(("n_inner", "d_ff", "ffn_dim", "vocab_size"), (1, 1 << 24)),
}

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)
