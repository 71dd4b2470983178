"""Mixtral and Qwen3-MoE: Llama's layers with a mixture of experts instead of the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any, Self, cast, final

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.models.config import DecoderConfig, Fields, check_is
from jaxserve.models.context import LayerContext
from jaxserve.models.decoder import Decoder
from jaxserve.models.families.llama import (
    LAYER,
    ROTARY_FIELDS,
    attention_weights,
    rotary_decoder_fields,
)
from jaxserve.models.family import Family
from jaxserve.models.layers import Block, gate_of
from jaxserve.models.linear import Linear
from jaxserve.models.norms import Norm, RMSNorm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.projection import normed, with_residual
from jaxserve.models.rope import Rope
from jaxserve.models.weights import Tensor, Weight
from pallas_kernels import log_sum_exp
from sharding.shards import TENSOR, num_tensor_shards, over_tensor, sum_over_tensor, tensor_index


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(DecoderConfig):
    """A configuration with a mixture of experts instead of each MLP."""

    num_experts: int  # the number of experts in a layer
    experts_per_token: int  # the number of experts that each token goes to
    # Whether the gates of a token's experts are scaled to a sum of one.
    normalises_gates: bool = True


@final
class MixtureOfExperts(nnx.Module):
    """Several gated MLPs; a router sends each token to a few of them and weighs their outputs.

        router    [embed, experts]
        gate_up   [experts, embed, 2, mlp]
        down      [experts, mlp, embed]

    Tokens are sorted by expert and multiplied group by group, so that no token is dropped, and each
    is multiplied only with the weights of its experts. On a mesh, each shard has its share of the
    experts.
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        config = cast(ExpertsConfig, config)
        self.config = config
        embed, mlp, experts = config.hidden_size, config.intermediate_size, config.num_experts
        self.router = new.weight(("embed", None), (embed, experts), stays_dense=True)
        self.gate_up = new.weight(
            ("experts", "embed", None, None), (experts, embed, 2, mlp), num_stacked=1
        )
        self.down = new.weight(("experts", None, "embed"), (experts, mlp, embed), num_stacked=1)

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        context: LayerContext,
        *,
        norm: Norm | None = None,
        residual: Float[Array, "tokens embed"] | None = None,
    ) -> Float[Array, "tokens embed"]:
        x = normed(x, norm)
        gates, experts = self._route(x, context.adapter)
        num_shards = num_tensor_shards()
        mix = over_tensor(
            partial(
                _mix,
                activation=self.config.activation,
                num_own=self.config.num_experts // num_shards,
                num_shards=num_shards,
            ),
            in_specs=(P(), P(), P(), P(), P(TENSOR), P(TENSOR)),
            out_specs=P(),
        )
        out = mix(x, gates, experts, context.adapter, Linear(self.gate_up), Linear(self.down))
        return with_residual(residual, out)

    def _route(
        self, x: Float[Array, "tokens embed"], adapter: Int32[Array, " tokens"] | None
    ) -> tuple[
        Float32[Array, "tokens experts_per_token"], Int32[Array, "tokens experts_per_token"]
    ]:
        scores = Linear(self.router)(x, adapter, out_dtype=jnp.float32)
        likeliest, experts = lax.top_k(scores, self.config.experts_per_token)
        gates = jnp.exp(likeliest - log_sum_exp(scores)[:, None])
        if self.config.normalises_gates:
            gates = gates / _sum(gates)[:, None]
        return gates, experts


def _mix(
    x: Float[Array, "tokens embed"],
    gates: Float32[Array, "tokens experts_per_token"],
    experts: Int32[Array, "tokens experts_per_token"],
    adapter: Int32[Array, " tokens"] | None,
    gate_up: Linear,  # weight [own experts, embed, 2, mlp]
    down: Linear,  # weight [own experts, mlp, embed]
    *,
    activation: str,
    num_own: int,
    num_shards: int,
) -> Float[Array, "tokens embed"]:
    """Return the weighted sum of each token's experts on this shard."""
    num_tokens, num_each = experts.shape
    # Own experts come first; those of other shards are sorted after them, and are in no group.
    own = experts.reshape(-1) - tensor_index(num_shards) * num_own
    own = own % (num_own * num_shards)
    order = jnp.argsort(own, stable=True)
    sizes = jnp.bincount(own, length=num_own * num_shards)[:num_own].astype(jnp.int32)
    token = order // num_each
    adapter = None if adapter is None else adapter[token]
    both = gate_up.grouped(x[token], sizes, adapter)  # [tokens * experts_per_token, 2, mlp]
    out = down.grouped(gate_of(activation)(both), sizes, adapter)
    # Undo the sort: token t's i-th expert is at t * num_each + i.
    out = jnp.where((own < num_own)[:, None], out[jnp.argsort(order)], 0)
    out = out.reshape(num_tokens, num_each, -1) * gates[..., None].astype(x.dtype)
    return sum_over_tensor(_sum(out), num_shards)


def _sum(x: Float[Array, "tokens few *shape"]) -> Float[Array, " tokens *shape"]:
    """Return the sum over the second axis, added in order for any number of tokens."""
    wide = x.astype(jnp.float32)
    return reduce(add, (wide[:, i] for i in range(x.shape[1]))).astype(x.dtype)


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
    """

    rope: Rope | None = Rope()
    expert_names: str = "mixtral"  # the names of experts in checkpoints, a key of `_EXPERT_NAMES`

    @property
    def num_mlp_parts(self) -> int:
        return self.num_experts

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
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
    norm_class = RMSNorm
    mlp_class = MixtureOfExperts


@final
class MoEDecoder(Decoder):
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
