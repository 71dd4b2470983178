"""Mixtral and Qwen3-MoE: Llama's layers with a mixture of experts in place of the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from jaxserve.models.config import Fields, check_is
from jaxserve.models.decoder import Decoder
from jaxserve.models.experts import ExpertsConfig, MixtureOfExperts
from jaxserve.models.families.llama import (
    LAYER,
    ROTARY_FIELDS,
    attention_weights,
    rotary_decoder_fields,
)
from jaxserve.models.family import Family
from jaxserve.models.layers import Block
from jaxserve.models.norms import RMSNorm
from jaxserve.models.rope import Rope
from jaxserve.models.weights import Tensor, Weight

_FIELDS = {
    "mixtral": Fields(
        ROTARY_FIELDS
        | dict(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
            sliding_window=None,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        aliases={"num_experts": "num_local_experts"},
    ),
    "qwen3_moe": Fields(
        ROTARY_FIELDS
        | dict(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=24,
            num_key_value_heads=4,
            max_position_embeddings=32768,
            attention_bias=False,
            use_sliding_window=False,
            sliding_window=4096,
            decoder_sparse_step=1,
            mlp_only_layers=None,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=False,
        ),
        nullable=("sliding_window",),
        aliases={"num_local_experts": "num_experts"},
    ),
}


@final
@dataclass(frozen=True, kw_only=True)
class MoEConfig(ExpertsConfig):
    """Mixtral (arXiv:2401.04088), Qwen3-MoE (arXiv:2505.09388).

    Attributes:
      intermediate_size: the inner size of one expert.
      expert_names: the names of experts in checkpoints, a key of `_EXPERT_NAMES`.
    """

    rope: Rope | None = Rope()
    expert_names: str = "mixtral"

    @property
    def num_mlp_parts(self) -> int:
        """See `DecoderConfig`."""
        return self.num_experts

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        """See `DecoderConfig.from_hf`."""
        given = _FIELDS[given["model_type"]].read(given)
        check_is(given, "hidden_act", ("silu", "swish"))
        if given["model_type"] == "mixtral":
            return cls(
                **rotary_decoder_fields(given),
                num_experts=given["num_local_experts"],
                experts_per_token=given["num_experts_per_tok"],
            )
        check_is(given, "decoder_sparse_step", (1,))
        check_is(given, "mlp_only_layers", (None, []))
        bias = bool(given["attention_bias"])
        return cls(
            **rotary_decoder_fields(given) | {"intermediate_size": given["moe_intermediate_size"]},
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            num_experts=given["num_experts"],
            experts_per_token=given["num_experts_per_tok"],
            normalises_gates=bool(given["norm_topk_prob"]),
            expert_names="qwen3_moe",
        )


# The names of the MLP, and of an expert's gate, up and down projection.
_EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe.", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp.", "gate_proj", "up_proj", "down_proj"),
}


@final
class MoEBlock(Block):
    """See `Block`."""

    norm_class = RMSNorm
    mlp_class = MixtureOfExperts


@final
class MoEDecoder(Decoder):
    """See `Decoder`."""

    block_class = MoEBlock


def _weights(config: MoEConfig) -> dict[str, Weight]:
    mlp, gate, up, down = _EXPERT_NAMES[config.expert_names]
    experts = [(n, f"{LAYER}{mlp}experts.{n}.") for n in range(config.num_experts)]
    gates_and_ups = [
        Tensor(f"{name}{which}.weight", "m e", n=n, u=place)
        for n, name in experts
        for place, which in enumerate((gate, up))
    ]
    downs = [Tensor(f"{name}{down}.weight", "e m", n=n) for n, name in experts]
    return {
        **attention_weights(config),
        "blocks.mlp.router": Weight.of(f"{LAYER}{mlp}gate.weight", "e n", "n e"),
        "blocks.mlp.gate_up": Weight("n e u m", tuple(gates_and_ups)),
        "blocks.mlp.down": Weight("n m e", tuple(downs)),
    }


FAMILY = Family(fields=_FIELDS, config=MoEConfig, decoder=MoEDecoder, weights=_weights)
