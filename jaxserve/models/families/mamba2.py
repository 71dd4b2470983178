"""Mamba-2: only recurrent layers, without attention and without MLPs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxserve.models.config import DecoderConfig, Fields, check_is
from jaxserve.models.context import LayerContext
from jaxserve.models.decoder import Decoder
from jaxserve.models.family import Family
from jaxserve.models.layers import Block
from jaxserve.models.mamba import Mamba2Mixer, Mamba2Sizes, mixer_weights, step_limits
from jaxserve.models.norms import RMSNorm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.weights import Weight

# The state has the same size after any number of tokens; this bounds the tables of a runtime.
_MAX_POSITIONS = 1 << 20
_DEFAULT_CONTEXT = 8192
_FIELDS = {
    "mamba2": Fields(
        dict(
            num_heads=128,
            head_dim=64,
            vocab_size=32768,
            hidden_size=4096,
            state_size=128,
            num_hidden_layers=64,
            layer_norm_epsilon=1e-5,
            conv_kernel=4,
            n_groups=8,
            use_bias=False,
            use_conv_bias=True,
            hidden_act="silu",
            residual_in_fp32=True,
            time_step_limit=(0.0, math.inf),
            tie_word_embeddings=False,
        )
    )
}


@final
@dataclass(frozen=True, kw_only=True)
class Mamba2Config(DecoderConfig):
    """Dao and Gu, arXiv:2405.21060; heads are those of the memory."""

    max_position_embeddings: int = _MAX_POSITIONS
    norm_eps: float = 1e-5
    has_wide_residual: bool = True  # whether the residual stream is in float32

    @property
    def default_context(self) -> int:
        return min(_DEFAULT_CONTEXT, self.max_position_embeddings)

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS["mamba2"].read(given)
        check_is(given, "hidden_act", ("silu", "swish"))
        low, high = step_limits(given)
        sizes = Mamba2Sizes(
            num_heads=given["num_heads"],
            head_dim=given["head_dim"],
            state_size=given["state_size"],
            num_groups=given["n_groups"],
            kernel_size=given["conv_kernel"],
            has_bias=bool(given["use_bias"]),
            has_conv_bias=bool(given["use_conv_bias"]),
            min_step=low,
            max_step=high,
        )
        return cls(
            vocab_size=given["vocab_size"],
            hidden_size=given["hidden_size"],
            intermediate_size=sizes.inner,
            num_layers=given["num_hidden_layers"],
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_heads,
            head_dim=sizes.head_dim,
            norm_eps=given["layer_norm_epsilon"],
            tie_word_embeddings=bool(given["tie_word_embeddings"]),
            has_wide_residual=bool(given["residual_in_fp32"]),
            layer_kinds=("recurrent",) * given["num_hidden_layers"],
            recurrence=sizes,
        )


@final
class Mamba2Block(Block):
    """x + mixer(norm(x))."""

    norm_class = RMSNorm

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        nnx.Module.__init__(self)  # not `Block`'s, which makes attention and an MLP
        self.norm = RMSNorm(config, new)
        self.mixer = Mamba2Mixer(config, new)
        self.dtype = config.dtype

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        update = self.mixer(self.norm(x).astype(self.dtype), context)
        return x + update.astype(x.dtype)


@final
class Mamba2(Decoder):
    block_class = Mamba2Block
    recurrent_block_class = Mamba2Block
    config: Mamba2Config  # pyrefly: ignore[bad-override-mutable-attribute]

    def _embed(
        self,
        tokens: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, "tokens embed"]:
        x = self._embedded(tokens, adapter)
        return x.astype(jnp.float32) if self.config.has_wide_residual else x

    def _end(
        self, x: Float[Array, "tokens embed"], adapter: Int32[Array, " tokens"] | None
    ) -> Float[Array, "tokens hidden"]:
        return self.norm(x).astype(self.config.dtype)


_LAYER = "backbone.layers.{layer}."


def _weights(config: Mamba2Config) -> dict[str, Weight]:
    return {
        "embedding": Weight.of("backbone.embeddings.weight", "v e"),
        "norm.scale": Weight.of("backbone.norm_f.weight"),
        "lm_head": Weight.of("lm_head.weight", "e v", "v e"),
        "blocks.norm.scale": Weight.of(_LAYER + "norm.weight"),
        **mixer_weights("blocks.mixer.", _LAYER + "mixer."),
    }


FAMILY = Family(
    fields=_FIELDS,
    config=Mamba2Config,
    decoder=Mamba2,
    weights=_weights,
    prefix="backbone.",
)
