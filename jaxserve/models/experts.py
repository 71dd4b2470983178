"""A mixture of experts as an MLP: each token goes to a few of them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast, final

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxserve.models.config import DecoderConfig
from jaxserve.models.layers import ACTIVATIONS, ParamMaker
from pallas_kernels import matmul
from sharding.shards import (
    TENSOR,
    num_tensor_shards,
    over_tensor,
    sum_over_tensor,
    tensor_index,
)

if TYPE_CHECKING:
    from jaxserve.models.families.moe import MoEConfig


@final
class MixtureOfExperts(nnx.Module):
    """Gated MLPs, of which a router picks a token's, and weighs them.

        router    [embed, experts]
        gate_up   [experts, embed, 2, mlp]
        down      [experts, mlp, embed]

    Tokens are sorted by expert and multiplied group by group (`lax.ragged_dot`), so that no token
    is dropped and none is multiplied with an expert that is not its own. On a mesh, each shard
    has its share of the experts.
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        config = cast("MoEConfig", config)
        self.config = config
        embed, mlp, experts = config.hidden_size, config.intermediate_size, config.num_experts
        self.router = new.normal(("embed", None), (embed, experts))
        self.gate_up = new.normal(
            ("experts", "embed", None, None), (experts, embed, 2, mlp), fan_in=embed
        )
        self.down = new.normal(("experts", None, "embed"), (experts, mlp, embed), fan_in=mlp)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[tokens, embed] to the same."""
        gates, experts = self._route(x)
        mix = over_tensor(
            partial(_mix, activation=self.config.activation, num_shards=num_tensor_shards()),
            in_specs=(P(), P(), P(), P(TENSOR), P(TENSOR)),
            out_specs=P(),
        )
        return mix(x, gates, experts, self.gate_up[...], self.down[...])

    def _route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Gates, float32, and experts, int32, of each token: [tokens, experts_per_token] each."""
        scores = matmul(x, self.router[...], out_dtype=jnp.float32)
        gates, experts = lax.top_k(jax.nn.softmax(scores), self.config.experts_per_token)
        if self.config.normalises_gates:
            gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
        return gates, experts


def _mix(
    x: jax.Array,  # [tokens, embed]
    gates: jax.Array,  # [tokens, experts_per_token]
    experts: jax.Array,  # int32, like gates
    gate_up: jax.Array,  # [own experts, embed, 2, mlp]
    down: jax.Array,  # [own experts, mlp, embed]
    *,
    activation: str,
    num_shards: int,
) -> jax.Array:
    """Each token's experts' outputs, weighed and added up. Own experts are a shard's."""
    num_own, embed = gate_up.shape[:2]
    num_tokens, num_each = experts.shape
    # Own experts come first; those of other shards are sorted behind, and are in no group.
    own = experts.reshape(-1) - tensor_index(num_shards) * num_own
    own = own % (num_own * num_shards)
    order = jnp.argsort(own, stable=True)
    sizes = jnp.bincount(own, length=num_own * num_shards)[:num_own].astype(jnp.int32)
    both = lax.ragged_dot(x[order // num_each], gate_up.reshape(num_own, embed, -1), sizes)
    gate, up = jnp.split(both, 2, axis=-1)
    out = lax.ragged_dot(ACTIVATIONS[activation](gate) * up, down, sizes)
    # Back to where token t's i-th expert is at t * num_each + i.
    out = jnp.where((own < num_own)[:, None], out[jnp.argsort(order)], 0)
    out = out.reshape(num_tokens, num_each, embed) * gates[..., None].astype(x.dtype)
    return sum_over_tensor(jnp.sum(out, axis=1), num_shards)
