"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention, an MLP or a mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from flax import nnx
from jaxtyping import Array, Float

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.attention import Attention
from jaxserve.models.config import (
    DecoderConfig,
    Fields,
    LayerKind,
    MLPKind,
    check_is,
    kinds_by_name,
)
from jaxserve.models.context import LayerContext
from jaxserve.models.decoder import Decoder
from jaxserve.models.experts import ExpertNames, expert_weights
from jaxserve.models.families.mamba import MambaBlock
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, Sublayer, activation_of
from jaxserve.models.mamba import Mamba2Sizes, mixer_weights
from jaxserve.models.norms import RMSNorm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.routing import ExpertsConfig
from jaxserve.models.weights import Weight, split_qkv, two_layer_mlp

_FIELDS = {
    "nemotron_h": Fields.of(
        vocab_size=131072,
        hidden_size=4096,
        layers_block_type=None,
        hybrid_override_pattern="ME*-",
        tie_word_embeddings=False,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        intermediate_size=21504,
        mlp_hidden_act="relu2",
        mlp_bias=False,
        ssm_state_size=128,
        mamba_num_heads=128,
        mamba_head_dim=64,
        mamba_hidden_act="silu",
        n_groups=8,
        conv_kernel=4,
        time_step_min=0.001,
        use_conv_bias=True,
        use_bias=False,
        n_routed_experts=8,
        moe_intermediate_size=7688,
        moe_shared_expert_intermediate_size=7688,
        moe_latent_size=None,
        num_experts_per_tok=2,
        routed_scaling_factor=1.0,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        layer_norm_epsilon=1e-5,
        aliases={
            "layer_types": "layers_block_type",
            "num_local_experts": "n_routed_experts",
            "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel",
            "mamba_dt_min": "time_step_min",
            "mamba_conv_bias": "use_conv_bias",
        },
    )
}
_BY_LETTER = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_BY_NAME: Mapping[str, tuple[LayerKind, MLPKind]] = {
    "linear_attention": ("recurrent", "dense"),
    "full_attention": ("attention", "dense"),
    "mlp": ("mlp", "dense"),
    "moe": ("mlp", "experts"),
}


@final
@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(DecoderConfig):
    """NVIDIA, arXiv:2504.03624; attention has no positions."""

    is_gated: bool = False

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS["nemotron_h"].read(given)
        check_is(given, "mamba_hidden_act", ("silu", "swish"))
        kinds = _kinds(given)
        sizes = Mamba2Sizes(
            num_heads=given["mamba_num_heads"],
            head_dim=given["mamba_head_dim"],
            state_size=given["ssm_state_size"],
            num_groups=given["n_groups"],
            kernel_size=given["conv_kernel"],
            has_bias=bool(given["use_bias"]),
            has_conv_bias=bool(given["use_conv_bias"]),
            min_step=given["time_step_min"],
            max_step=math.inf,
        )
        experts = ExpertsConfig.from_hf(
            given,
            latent_size=given["moe_latent_size"],
            is_gated=False,
            scores="sigmoid",
            has_correction=True,
            shared_size=given["moe_shared_expert_intermediate_size"],
        )
        return cls(
            vocab_size=given["vocab_size"],
            hidden_size=given["hidden_size"],
            intermediate_size=given["intermediate_size"],
            num_layers=len(kinds),
            num_heads=given["num_attention_heads"],
            num_kv_heads=given["num_key_value_heads"],
            head_dim=given["head_dim"],
            max_position_embeddings=given["max_position_embeddings"],
            activation=activation_of(given, "mlp_hidden_act"),
            norm_eps=given["layer_norm_epsilon"],
            tie_word_embeddings=bool(given["tie_word_embeddings"]),
            mlp_bias=bool(given["mlp_bias"]),
            layer_kinds=tuple(kind for kind, _ in kinds),
            mlp_kinds=tuple(kind for _, kind in kinds),
            recurrence=sizes,
            experts=experts if ("mlp", "experts") in kinds else None,
        )


def _kinds(given: Mapping[str, Any]) -> tuple[tuple[LayerKind, MLPKind], ...]:
    """Return the kinds of each layer, or raise UnsupportedModelError for an unknown one."""
    names, pattern = given["layers_block_type"], given["hybrid_override_pattern"]
    if names is None:
        if not pattern or not set(pattern) <= set(_BY_LETTER):
            raise UnsupportedModelError(
                f"hybrid_override_pattern={pattern!r} is not supported; give one of "
                f"{''.join(_BY_LETTER)!r} for each layer"
            )
        names = [_BY_LETTER[letter] for letter in pattern]
    return kinds_by_name(names, _BY_NAME, len(names))


@final
class AttentionBlock(Block):
    """x + attention(norm(x))."""

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        nnx.Module.__init__(self)  # not `Block`'s, which makes an MLP
        self.norm = RMSNorm(config, new)
        self.attention = Attention(config, new)

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        return self.attention(x, context, norm=self.norm, residual=x)


@final
class MLPBlock(Block):
    """x + mlp(norm(x))."""

    def __init__(
        self, config: DecoderConfig, new: ParamMaker, *, mlp_class: type[Sublayer] | None = None
    ):
        nnx.Module.__init__(self)  # not `Block`'s, which makes attention
        self.norm = RMSNorm(config, new)
        self.mlp = self.new_mlp(config, new, mlp_class)

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        return self.mlp(x, context, norm=self.norm, residual=x)


@final
class NemotronH(Decoder):
    block_class = AttentionBlock
    recurrent_block_class = MambaBlock

    def _block_class(self, layer: int) -> type[Block]:
        return MLPBlock if self.config.layer_kinds[layer] == "mlp" else super()._block_class(layer)


_LAYER = "backbone.layers.{layer}."
_PART = _LAYER + "mixer."


def _weights(config: NemotronHConfig) -> dict[str, Weight]:
    return {
        "embedding": Weight.of("backbone.embeddings.weight", "v e"),
        "norm.scale": Weight.of("backbone.norm_f.weight"),
        "lm_head": Weight.of("lm_head.weight", "e v", "v e"),
        "blocks.norm.scale": Weight.of(_LAYER + "norm.weight"),
        **mixer_weights("blocks.mixer.", _PART),
        "blocks.attention.wqkv": split_qkv(_PART, "weight", config.group),
        "blocks.attention.wo": Weight.of(_PART + "o_proj.weight", "k g d e", "e (k g d)"),
        **two_layer_mlp("blocks.mlp", _PART + "up_proj", _PART + "down_proj"),
        **expert_weights(config, _LAYER, ExpertNames(mlp="mixer.", shared="shared_experts.")),
    }


FAMILY = Family(
    fields=_FIELDS,
    config=NemotronHConfig,
    decoder=NemotronH,
    weights=_weights,
    prefix="backbone.",
    # Layers that predict further tokens are not read.
    ignored=r".*\.rotary_emb\.inv_freq|mtp\..*",
)
