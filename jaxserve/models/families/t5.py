"""T5, T5 1.1, Flan-T5, UL2 and mT5: an encoder, a decoder, and relative positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, final

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import BY_LAYER, DecoderConfig, Fields, check_is
from jaxserve.models.context import LayerContext
from jaxserve.models.encoder_decoder import CrossBlock, EncoderDecoder, added
from jaxserve.models.family import Family
from jaxserve.models.layers import ACTIVATIONS, Block
from jaxserve.models.norms import RMSNorm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.weights import Tensor, Weight, gate_and_up

# Relative positions have no longest context; this bounds the tables of a runtime.
_MAX_POSITIONS = 32768
_HEAD = "lm_head.weight"
_T5 = Fields.of(
    dict(pad_token_id=0),  # which all T5 models read
    vocab_size=32128,
    d_model=512,
    d_kv=64,
    d_ff=2048,
    num_layers=6,
    num_decoder_layers=None,
    num_heads=8,
    relative_attention_num_buckets=32,
    relative_attention_max_distance=128,
    layer_norm_epsilon=1e-6,
    feed_forward_proj="relu",
    is_encoder_decoder=True,
    decoder_start_token_id=None,
    tie_word_embeddings=True,
    scale_decoder_outputs=True,
    n_positions=None,
    nullable=("pad_token_id", "tie_word_embeddings", "scale_decoder_outputs"),
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
)
_FIELDS = {
    "t5": _T5,
    "mt5": replace(
        _T5,
        defaults={
            **_T5.defaults,
            **dict(vocab_size=250112, d_ff=1024, num_layers=8, num_heads=6),
            **dict(feed_forward_proj="gated-gelu", decoder_start_token_id=0),
        },
        nullable=("pad_token_id", "decoder_start_token_id", "scale_decoder_outputs"),
    ),
}


@final
@dataclass(frozen=True, kw_only=True)
class T5Config(DecoderConfig):
    """Raffel et al., arXiv:1910.10683; `num_layers` are those of the decoder."""

    activation: str = "relu"
    tie_word_embeddings: bool = True
    attention_scale: float | None = 1.0
    max_position_embeddings: int = _MAX_POSITIONS
    decoder_start_token_id: int | None = 0
    num_encoder_layers: int  # layers of the encoder
    # num_buckets, max_distance: of relative positions, see `encoder_decoder.causal_biases`.
    num_buckets: int = 32
    max_distance: int = 128
    is_gated: bool = False  # whether the MLP has a gate, as from version 1.1 on
    # Whether the input of the logits is divided by sqrt(hidden_size), as in version 1.0.
    scales_logits: bool = True
    usual_length: int = 512  # tokens of a prompt, and of an answer, that the model was trained with

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_encoder_layers < 1:
            raise UnsupportedModelError(
                f"num_encoder_layers={self.num_encoder_layers} must be at least 1"
            )
        exact = self.num_buckets // 4
        if self.num_buckets % 4 or not 0 < 2 * exact < self.max_distance:
            raise UnsupportedModelError(
                f"{self.num_buckets} buckets of relative positions up to {self.max_distance}: only "
                "a multiple of 4 is supported, and a distance above half of it"
            )

    @property
    def default_context(self) -> int:
        """Return the length of a prompt and an answer of the usual length."""
        return min(2 * self.usual_length, self.max_position_embeddings)

    @property
    def down_dtype(self) -> str | None:
        """Return float32 for a model in float16, which would overflow there."""
        return "float32" if self.dtype == "float16" else None

    @property
    def encoder(self) -> Self:
        by_layer: dict[str, Any] = dict.fromkeys(BY_LAYER, ())
        return replace(self, num_layers=self.num_encoder_layers, **by_layer)

    def fitted_to(self, shapes: Mapping[str, tuple[int, ...]]) -> Self:
        """Correct the tie: transformers 5 writes that all models tie, whether they do or not.

        From version 1.1 on, a checkpoint has a head of its own exactly if it is not tied.
        """
        return (
            self if self.scales_logits else replace(self, tie_word_embeddings=_HEAD not in shapes)
        )

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS[given["model_type"]].read(given)
        check_is(given, "is_encoder_decoder", (True,))
        kind = given["model_type"]
        is_multilingual = kind == "mt5"
        activation, is_gated = _feed_forward(given["feed_forward_proj"])
        ties = given["tie_word_embeddings"] is not False
        scales = bool(given["scale_decoder_outputs"]) and ties and not is_multilingual
        start = given["decoder_start_token_id"]
        return cls(
            vocab_size=given["vocab_size"],
            hidden_size=given["d_model"],
            intermediate_size=given["d_ff"],
            num_layers=given["num_decoder_layers"] or given["num_layers"],
            num_encoder_layers=given["num_layers"],
            num_heads=given["num_heads"],
            num_kv_heads=given["num_heads"],
            head_dim=given["d_kv"],
            norm_eps=given["layer_norm_epsilon"],
            activation=activation,
            is_gated=is_gated,
            tie_word_embeddings=ties,
            scales_logits=scales,
            num_buckets=given["relative_attention_num_buckets"],
            max_distance=given["relative_attention_max_distance"],
            usual_length=given["n_positions"] or 512,
            decoder_start_token_id=(given["pad_token_id"] or 0) if start is None else start,
        )


def _feed_forward(name: str) -> tuple[str, bool]:
    """Return the activation of `feed_forward_proj`, and whether the MLP has a gate."""
    gate, _, activation = name.rpartition("-")
    activation = "gelu_new" if name == "gated-gelu" else activation
    if gate not in ("", "gated") or activation not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"feed_forward_proj={name!r} is not supported; supported are {tuple(ACTIVATIONS)}, and "
            "the same after 'gated-'"
        )
    return activation, gate == "gated"


@final
class T5Norm(nnx.Module):
    """An `RMSNorm` whose output has the model's dtype, even if the residual stream is wider."""

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        self.norm = RMSNorm(config, new)
        self.dtype = config.dtype

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return self.norm(x).astype(self.dtype)


@final
class T5EncoderBlock(Block):
    norm_class = T5Norm

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        x = added(x, self.attention(self.attention_norm(x), context))
        return added(x, self.mlp(self.mlp_norm(x), context))


@final
class T5Block(CrossBlock):
    norm_class = T5Norm


@final
class T5(EncoderDecoder):
    """The `EncoderDecoder` of T5. In float16 the residual stream is float32, as in transformers."""

    block_class = T5Block
    encoder_block_class = T5EncoderBlock
    config: T5Config  # pyrefly: ignore[bad-override-mutable-attribute]

    def _embed(
        self,
        tokens: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, "tokens embed"]:
        x = self._embedded(tokens, adapter)
        return x.astype(jnp.float32) if self.config.dtype == "float16" else x

    def _end(
        self, x: Float[Array, "tokens embed"], adapter: Int32[Array, " tokens"] | None
    ) -> Float[Array, "tokens hidden"]:
        x = self.norm(x)
        return x * self.config.hidden_size**-0.5 if self.config.scales_logits else x


def _weights(config: T5Config) -> dict[str, Weight]:
    return {
        "embedding": Weight.of("shared.weight", "v e"),
        "lm_head": Weight.of(_HEAD, "e v", "v e"),
        "norm.norm.scale": Weight.of("decoder.final_layer_norm.weight"),
        "relative_bias": _biases("decoder"),
        "encoder.norm.norm.scale": Weight.of("encoder.final_layer_norm.weight"),
        "encoder.relative_bias": _biases("encoder"),
        **_layer("encoder.blocks.", "encoder.block.{layer}.layer."),
        **_layer("blocks.", "decoder.block.{layer}.layer.", has_cross=True),
    }


def _biases(stack: str) -> Weight:
    name = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return Weight.of(name, "b k")


def _layer(path: str, name: str, *, has_cross: bool = False) -> dict[str, Weight]:
    own, cross, mlp = f"{name}0.", f"{name}1.", f"{name}{1 + has_cross}."
    dense = mlp + "DenseReluDense."
    weights = {
        f"{path}attention_norm.norm.scale": Weight.of(own + "layer_norm.weight"),
        f"{path}attention.wqkv": _projections(own + "SelfAttention.", "qkv"),
        f"{path}attention.wo": _output(own + "SelfAttention."),
        f"{path}mlp_norm.norm.scale": Weight.of(mlp + "layer_norm.weight"),
        f"{path}mlp.gate_up": gate_and_up(dense + "wi_0.weight", dense + "wi_1.weight", "weight"),
        f"{path}mlp.up": Weight.of(dense + "wi.weight", "e m", "m e"),
        f"{path}mlp.down": Weight.of(dense + "wo.weight", "m e", "e m"),
    }
    if has_cross:
        weights |= {
            f"{path}cross_norm.norm.scale": Weight.of(cross + "layer_norm.weight"),
            f"{path}cross.wq": _projections(cross + "EncDecAttention.", "q"),
            f"{path}cross.wkv": _projections(cross + "EncDecAttention.", "kv"),
            f"{path}cross.wo": _output(cross + "EncDecAttention."),
        }
    return weights


def _projections(prefix: str, letters: str) -> Weight:
    """Return a fused projection, one matrix a letter."""
    tensors = (
        Tensor(f"{prefix}{letter}.weight", "(k d) e", x=column)
        for column, letter in enumerate(letters)
    )
    return Weight("e k x d", tuple(tensors))


def _output(prefix: str) -> Weight:
    return Weight.of(prefix + "o.weight", "k g d e", "e (k g d)")


FAMILY = Family(
    fields=_FIELDS,
    config=T5Config,
    decoder=T5,
    weights=_weights,
    prefix="",
    ignored=r"(encoder|decoder)\.embed_tokens\.weight"
    r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
)
