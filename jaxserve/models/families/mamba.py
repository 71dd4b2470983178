"""Mamba 1 and 2, Falcon-Mamba: only recurrent layers, without attention and without MLPs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxserve.models import mamba, mamba1
from jaxserve.models.config import DecoderConfig, Fields, check_is
from jaxserve.models.context import LayerContext
from jaxserve.models.decoder import Decoder
from jaxserve.models.family import Family
from jaxserve.models.layers import Block
from jaxserve.models.mamba import Mamba2Sizes, step_limits
from jaxserve.models.mamba1 import Mamba1Sizes, mamba1_sizes
from jaxserve.models.norms import RMSNorm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.weights import Weight

# The state has the same size after any number of tokens; this bounds the tables of a runtime.
_MAX_POSITIONS = 1 << 20
_DEFAULT_CONTEXT = 8192
_SHARED = dict(
    num_hidden_layers=32,
    layer_norm_epsilon=1e-5,
    conv_kernel=4,
    use_bias=False,
    use_conv_bias=True,
    hidden_act="silu",
    residual_in_fp32=True,
)
_MAMBA = _SHARED | dict(
    vocab_size=50280,
    hidden_size=768,
    state_size=16,
    expand=2,
    time_step_rank="auto",
    tie_word_embeddings=True,
)
_FIELDS = {
    "mamba2": Fields.of(
        _SHARED,
        num_heads=128,
        head_dim=64,
        vocab_size=32768,
        hidden_size=4096,
        state_size=128,
        num_hidden_layers=64,
        n_groups=8,
        time_step_limit=(0.0, math.inf),
        tie_word_embeddings=False,
    ),
    "mamba": Fields(_MAMBA),
    "falcon_mamba": Fields.of(_MAMBA, mixer_rms_eps=1e-6),
}


@final
@dataclass(frozen=True, kw_only=True)
class MambaConfig(DecoderConfig):
    """Mamba (arXiv:2312.00752), Mamba-2 (arXiv:2405.21060), Falcon-Mamba (arXiv:2410.05355).

    Heads are those of the memory; Mamba has one.
    """

    max_position_embeddings: int = _MAX_POSITIONS
    norm_eps: float = 1e-5
    has_wide_residual: bool = True  # whether the residual stream is in float32

    @property
    def default_context(self) -> int:
        return min(_DEFAULT_CONTEXT, self.max_position_embeddings)

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS[given["model_type"]].read(given)
        check_is(given, "hidden_act", ("silu", "swish"))
        sizes = _second(given) if given["model_type"] == "mamba2" else _first(given)
        num_heads = sizes.num_heads if isinstance(sizes, Mamba2Sizes) else 1
        return cls(
            vocab_size=given["vocab_size"],
            hidden_size=given["hidden_size"],
            intermediate_size=sizes.inner,
            num_layers=given["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=sizes.inner // num_heads,
            norm_eps=given["layer_norm_epsilon"],
            tie_word_embeddings=bool(given["tie_word_embeddings"]),
            has_wide_residual=bool(given["residual_in_fp32"]),
            layer_kinds=("recurrent",) * given["num_hidden_layers"],
            recurrence=sizes,
        )


def _first(given: Mapping[str, Any]) -> Mamba1Sizes:
    return mamba1_sizes(
        given["hidden_size"],
        expand=given["expand"],
        step_rank=given["time_step_rank"],
        state_size=given["state_size"],
        kernel_size=given["conv_kernel"],
        has_bias=bool(given["use_bias"]),
        has_conv_bias=bool(given["use_conv_bias"]),
        norm="unit" if given["model_type"] == "falcon_mamba" else None,
        norm_eps=given.get("mixer_rms_eps", 1e-6),
    )


def _second(given: Mapping[str, Any]) -> Mamba2Sizes:
    low, high = step_limits(given)
    return Mamba2Sizes(
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


@final
class MambaBlock(Block):
    """x + mixer(norm(x))."""

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        nnx.Module.__init__(self)  # not `Block`'s, which makes attention and an MLP
        self.norm = RMSNorm(config, new)
        assert config.recurrence is not None, "a model without recurrent layers"
        self.mixer = config.recurrence.mixer(config, new)
        self.dtype = config.dtype

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        update = self.mixer(self.norm(x).astype(self.dtype), context)
        return x + update.astype(x.dtype)


@final
class Mamba(Decoder):
    block_class = MambaBlock
    recurrent_block_class = MambaBlock
    config: MambaConfig  # pyrefly: ignore[bad-override-mutable-attribute]

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


def _weights(config: MambaConfig) -> dict[str, Weight]:
    is_second = isinstance(config.recurrence, Mamba2Sizes)
    own = mamba.mixer_weights if is_second else mamba1.mixer_weights
    return {
        "embedding": Weight.of("backbone.embeddings.weight", "v e"),
        "norm.scale": Weight.of("backbone.norm_f.weight"),
        "lm_head": Weight.of("lm_head.weight", "e v", "v e"),
        "blocks.norm.scale": Weight.of(_LAYER + "norm.weight"),
        **own("blocks.mixer.", _LAYER + "mixer."),
    }


FAMILY = Family(
    fields=_FIELDS, config=MambaConfig, decoder=Mamba, weights=_weights, prefix="backbone."
)
