"""The router of a mixture of experts: which experts a token goes to, and with which weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, Literal, Self, final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.kernels import log_sum_exp

ExpertLayout = Literal["each", "out_in", "in_out"]


@final
@dataclass(frozen=True, kw_only=True)
class ClampedGate:
    """The gate of gpt-oss: gates and ups are clamped, and ups have one added."""

    slope: float
    limit: float

    def __call__(self, both: Float[Array, "tokens 2 out"]) -> Float[Array, "tokens out"]:
        gate = jnp.minimum(both[:, 0], self.limit)
        up = jnp.clip(both[:, 1], -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.slope * gate) * (up + 1)


@final
@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The sizes of a layer's mixture of experts, and how its router chooses.

    A token's scores are the softmax of its router logits, or the sigmoid of each. It goes to the
    `per_token` experts of the highest scores, and the score of an expert is its gate.

    Attributes:
      size: the inner size of an expert.
      latent_size: the width of what experts read and give, if a token is projected to it and back.
      is_gated: whether experts, and the MLP of all tokens, are gated.
      normalises_gates: whether a token's gates are scaled to a sum of one.
      gate_scale: the factor of the gates, after that.
      num_groups: the number of groups of consecutive experts. A token goes to experts of its
        `num_chosen_groups` best groups only.
      group_score: whether a group counts as much as its best expert, or the sum of its two best.
      has_correction: whether scores have a bias that counts for the choice, and not for the gates.
      near_best: if given, experts are chosen one after the other, and the gate of each is its
        softmax among those not chosen before whose logits are near its own: their distance is at
        most this share of the larger of its logit and their magnitude (GRIN, arXiv:2409.12136).
      has_router_bias: whether the router's logits have a bias.
      has_bias: whether the products of the experts have biases.
      clamped_gate: the function of gates and ups, if it is not that of the model's MLPs.
      scales_input: whether gates multiply the inputs of the experts instead of their outputs.
      shared_size: the inner size of the MLP that every token goes to in addition; None without one.
      has_shared_gate: whether the output of that MLP is multiplied by the sigmoid of a product.
      layout: whether the checkpoint has tensors of each expert, [out, in], or one of all experts of
        a layer, [experts, out, in] or [experts, in, out].
    """

    num: int
    size: int
    per_token: int
    latent_size: int | None = None
    is_gated: bool = True
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalises_gates: bool = True
    gate_scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: Literal["best", "sum_of_two"] = "sum_of_two"
    has_correction: bool = False
    near_best: float | None = None
    has_router_bias: bool = False
    has_bias: bool = False
    clamped_gate: ClampedGate | None = None
    scales_input: bool = False
    shared_size: int | None = None
    has_shared_gate: bool = False
    layout: ExpertLayout = "each"

    @classmethod
    def from_hf(cls, given: Mapping[str, Any], **own: Any) -> Self:
        """Read the fields that most families have under one of these names; `own` precede them.

        `given` is the result of `config.Fields.read`. Absent fields have the values above.
        """
        numbers = (given.get(name) for name in ("num_experts", "num_local_experts"))
        found: dict[str, Any] = dict(
            num=next((n for n in numbers if n is not None), given.get("n_routed_experts")) or 0,
            size=given.get("moe_intermediate_size", given.get("intermediate_size")),
            per_token=given.get("num_experts_per_tok"),
            normalises_gates=bool(given.get("norm_topk_prob", True)),
            gate_scale=float(given.get("routed_scaling_factor", 1.0)),
            num_groups=given.get("n_group", 1),
            num_chosen_groups=given.get("topk_group", 1),
        )
        return cls(**(found | own))

    def fitted_to(self, shapes: Mapping[str, tuple[int, ...]], width: int) -> Self:
        """Return the configuration with the layout of a checkpoint's tensors.

        `width` is that of the residual stream. Without tensors of the common names, it stays.
        """
        if any(".experts.0." in name for name in shapes):
            return replace(self, layout="each")
        width = self.latent_size or width
        down = next((n for n in shapes if n.endswith(".experts.down_proj")), None)
        if down is None:
            return self
        # One of the two products at least has other sizes of inputs than of outputs.
        gate_up = shapes.get(f"{down.removesuffix('down_proj')}gate_up_proj", ())
        is_out_in = shapes[down][1:] == (width, self.size)
        if width == self.size:
            is_out_in = gate_up[1:] in ((2 * self.size, width), ())
        return replace(self, layout="out_in" if is_out_in else "in_out")


def choose(
    logits: Float32[Array, "tokens experts"],
    config: ExpertsConfig,
    correction: Float32[Array, " experts"] | None = None,
) -> tuple[Float32[Array, "tokens experts_per_token"], Int32[Array, "tokens experts_per_token"]]:
    """Return each token's gates and experts; a token's result does not depend on the others."""
    if config.near_best is not None:
        return _one_by_one(logits, config.per_token, config.near_best)
    if config.scores == "softmax":
        scores = jnp.exp(logits - log_sum_exp(logits)[:, None])
    else:
        scores = jax.nn.sigmoid(logits)
    # Without anything that shifts scores, logits have the same order, and no ties by rounding.
    ranks = logits
    if correction is not None or config.num_groups > 1:
        ranks = scores if correction is None else scores + correction
    if config.num_groups > 1:
        ranks = _in_best_groups(ranks, config)
    _, experts = lax.top_k(ranks, config.per_token)
    gates = jnp.take_along_axis(scores, experts, axis=1)
    if config.normalises_gates:
        gates = gates / (sum_few(gates)[:, None] + _TINY)
    return gates if config.gate_scale == 1 else gates * config.gate_scale, experts


def _one_by_one(
    logits: Float32[Array, "tokens experts"], per_token: int, near: float
) -> tuple[Float32[Array, "tokens experts_per_token"], Int32[Array, "tokens experts_per_token"]]:
    """Return gates and experts, see `ExpertsConfig.near_best`."""
    left, gates, experts = logits, [], []
    for _ in range(per_token):
        best = left.max(axis=1, keepdims=True)
        expert = left.argmax(axis=1).astype(jnp.int32)
        is_near = (best - logits) / jnp.maximum(jnp.abs(logits), best) <= near
        gates.append(jnp.exp(best[:, 0] - log_sum_exp(jnp.where(is_near, left, -jnp.inf))))
        experts.append(expert)
        left = jnp.where(expert[:, None] == jnp.arange(logits.shape[1]), -jnp.inf, left)
    return jnp.stack(gates, axis=1), jnp.stack(experts, axis=1)


# Keeps the quotient finite if all sigmoids are zero; no other sum changes by it.
_TINY = 1e-20


def _in_best_groups(
    ranks: Float32[Array, "tokens experts"], config: ExpertsConfig
) -> Float32[Array, "tokens experts"]:
    """Return the ranks, with -inf in all groups except a token's best ones."""
    grouped = ranks.reshape(ranks.shape[0], config.num_groups, -1)
    if config.group_score == "best":
        totals = grouped.max(axis=-1)
    else:
        best, second = jnp.moveaxis(lax.top_k(grouped, 2)[0], -1, 0)
        totals = best + second
    _, chosen = lax.top_k(totals, config.num_chosen_groups)
    is_chosen = (chosen[:, :, None] == jnp.arange(config.num_groups)).any(axis=1)
    return jnp.where(is_chosen[:, :, None], grouped, -jnp.inf).reshape(ranks.shape)


def sum_few(x: Float[Array, "tokens few *shape"]) -> Float[Array, " tokens *shape"]:
    """Return the sum over the second axis, added in order for any number of tokens."""
    wide = x.astype(jnp.float32)
    return reduce(add, (wide[:, i] for i in range(x.shape[1]))).astype(x.dtype)
