"""The mixture of experts that layers can have instead of an MLP, and its tensors in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, final

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.models.config import DecoderConfig
from jaxserve.models.context import LayerContext
from jaxserve.models.layers import ACTIVATIONS, GatedMLP, TwoLayerMLP, gate_of
from jaxserve.models.linear import Linear, SumsRows
from jaxserve.models.norms import Norm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.projection import normed, with_residual
from jaxserve.models.routing import choose, sum_few
from jaxserve.models.weights import Tensor, Weight, gated_mlp, two_layer_mlp
from jaxserve.sharding.shards import (
    TENSOR,
    num_tensor_shards,
    over_tensor,
    sum_over_tensor,
    tensor_index,
)


@final
class Experts(SumsRows):
    """The MLPs of a mixture, gated or not.

    gate_up   [experts, embed, 2, mlp]    if they are gated
    up        [experts, embed, mlp]       otherwise
    down      [experts, mlp, embed]
    bgate_up, bdown                       if the config has biases; for gated ones
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        mixture = config.experts
        assert mixture is not None
        embed = mixture.latent_size or config.hidden_size
        mlp, num = mixture.size, mixture.num
        self.is_gated = mixture.is_gated
        if mixture.is_gated:
            self.gate_up = new.weight(
                ("experts", "embed", None, None), (num, embed, 2, mlp), num_stacked=1
            )
        else:
            self.up = new.weight(("experts", "embed", None), (num, embed, mlp), num_stacked=1)
        self.down = new.weight(("experts", None, "embed"), (num, mlp, embed), num_stacked=1)
        has_bias = mixture.has_bias
        self.bgate_up = new.zeros(("experts", None, None), (num, 2, mlp)) if has_bias else None
        self.bdown = new.zeros(("experts", "embed"), (num, embed)) if has_bias else None

    @property
    def products(self) -> tuple[Linear, Linear]:
        """The products before and after the activation."""
        linear = partial(Linear, row_kernels=self.row_kernels)
        first = linear(self.gate_up, self.bgate_up) if self.is_gated else linear(self.up)
        return first, linear(self.down, self.bdown)


@final
class MixtureOfExperts(SumsRows):
    """Several MLPs; a router sends each token to a few of them and weighs their outputs.

        router         [embed, experts]
        router_bias, correction  [experts]    if the config has them
        experts        `Experts`
        shared         the MLP that every token goes to, if the config has one
        shared_gate    [embed, 1]             if the config has it
        latent_in      [embed, latent]        if the config has a latent size, and a bias blatent_in
        latent_out     [latent, embed]        likewise, of the sum of a token's experts

    Tokens are sorted by expert and multiplied group by group, so that no token is dropped, and each
    is multiplied only with the weights of its experts. On a mesh, each shard has its share of the
    experts.
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        mixture = config.experts
        assert mixture is not None, "a model without experts"
        self.config, self.activation = mixture, config.activation
        embed = config.hidden_size
        self.router = new.weight(("embed", None), (embed, mixture.num), stays_dense=True)
        if mixture.has_router_bias:
            self.router_bias = new.zeros((None,), (mixture.num,))
        if mixture.has_correction:
            self.correction = new.with_dtype("float32").zeros((None,), (mixture.num,))
        self.experts = Experts(config, new)
        if mixture.shared_size is not None:
            own = replace(config, intermediate_size=mixture.shared_size)
            self.shared = (GatedMLP if mixture.is_gated else TwoLayerMLP)(own, new)
        if mixture.has_shared_gate:
            self.shared_gate = new.weight(("embed", None), (embed, 1), stays_dense=True)
        if mixture.latent_size is not None:
            latent, has_bias = mixture.latent_size, config.mlp_bias
            self.latent_in = new.weight(("embed", None), (embed, latent))
            self.latent_out = new.weight((None, "embed"), (latent, embed))
            self.blatent_in = new.zeros((None,), (latent,)) if has_bias else None
            self.blatent_out = new.zeros(("embed",), (embed,)) if has_bias else None

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        context: LayerContext,
        *,
        norm: Norm | None = None,
        residual: Float[Array, "tokens embed"] | None = None,
    ) -> Float[Array, "tokens embed"]:
        config, adapter = self.config, context.adapter
        linear = partial(Linear, row_kernels=self.row_kernels)
        x = normed(x, norm)
        bias = self.router_bias if config.has_router_bias else None
        logits = linear(self.router, bias)(x, adapter, out_dtype=jnp.float32)
        correction = self.correction[...] if config.has_correction else None
        gates, experts = choose(logits, config, correction)
        num_shards = num_tensor_shards()
        mix = over_tensor(
            partial(
                _mix,
                gate=self._gate,
                num_own=config.num // num_shards,
                num_shards=num_shards,
                scales_input=config.scales_input,
            ),
            in_specs=(P(), P(), P(), P(), P(TENSOR), P(TENSOR)),
            out_specs=P(),
        )
        inner = x
        if config.latent_size is not None:
            inner = linear(self.latent_in, self.blatent_in)(x, adapter)
        out = mix(inner, gates, experts, adapter, *self.experts.products)
        if config.latent_size is not None:
            out = linear(self.latent_out, self.blatent_out)(out, adapter)
        if config.shared_size is not None:
            shared = self.shared(x, context)
            if config.has_shared_gate:
                share = linear(self.shared_gate)(x, adapter, out_dtype=jnp.float32)
                shared = shared * jax.nn.sigmoid(share).astype(x.dtype)
            out = out + shared
        return with_residual(residual, out)

    @property
    def _gate(self) -> Callable[[Array], Array]:
        if self.config.clamped_gate is not None:
            return self.config.clamped_gate
        return gate_of(self.activation) if self.config.is_gated else ACTIVATIONS[self.activation]


def _mix(
    x: Float[Array, "tokens embed"],
    gates: Float32[Array, "tokens experts_per_token"],
    experts: Int32[Array, "tokens experts_per_token"],
    adapter: Int32[Array, " tokens"] | None,
    first: Linear,  # weight [own experts, embed, 2, mlp], or [own experts, embed, mlp]
    down: Linear,  # weight [own experts, mlp, embed]
    *,
    gate: Callable[[Array], Array],
    num_own: int,
    num_shards: int,
    scales_input: bool,
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
    weights = gates.astype(x.dtype)
    inputs = x[token] * weights.reshape(-1, 1)[order] if scales_input else x[token]
    out = down.grouped(gate(first.grouped(inputs, sizes, adapter)), sizes, adapter)
    # Undo the sort: token t's i-th expert is at t * num_each + i.
    out = jnp.where((own < num_own)[:, None], out[jnp.argsort(order)], 0)
    out = out.reshape(num_tokens, num_each, -1)
    return sum_over_tensor(sum_few(out if scales_input else out * weights[..., None]), num_shards)


@final
@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """The names of a mixture's tensors in checkpoints, after the layer's.

    Attributes:
      gate, up, down: the projections of an expert with a tensor for each; names after
        `experts.{number}.`.
      gate_up, up_all, down_all: the tensors of all experts, which a checkpoint can have instead.
        Experts without gates have `up_all`.
      both: the order of gates and ups in `gate_up`: one after the other, or in turns.
    """

    mlp: str = "mlp."
    router: str = "gate.weight"
    router_bias: str = "gate.bias"
    correction: str = "gate.e_score_correction_bias"
    correction_layout: str = "n"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str = "experts.gate_up_proj"
    up_all: str = "experts.up_proj"
    down_all: str = "experts.down_proj"
    both: Literal["(u m)", "(m u)"] = "(u m)"
    shared: str = "shared_expert."
    shared_gate: str = "shared_expert_gate.weight"
    latent_in: str = "fc1_latent_proj"
    latent_out: str = "fc2_latent_proj"


def expert_weights(config: DecoderConfig, layer: str, names: ExpertNames) -> dict[str, Weight]:
    """Return the weights of a `MixtureOfExperts`; `layer` begins the names of its tensors."""
    mixture = config.experts
    if mixture is None:
        return {}
    mlp, path = layer + names.mlp, "blocks.mlp."
    if mixture.layout != "each":
        is_out_in = mixture.layout == "out_in"
        gate_up_axes = f"n {names.both} e" if is_out_in else f"n e {names.both}"
        gates_and_ups = [Tensor(mlp + names.gate_up, gate_up_axes)]
        ups = [Tensor(mlp + names.up_all, "n m e" if is_out_in else "n e m")]
        downs = [Tensor(mlp + names.down_all, "n e m" if is_out_in else "n m e")]
        gate_up_biases = [Tensor(f"{mlp}{names.gate_up}_bias", f"n {names.both}")]
        down_bias = f"{mlp}{names.down_all}_bias"
    else:
        each = [(n, f"{mlp}experts.{n}.") for n in range(mixture.num)]
        gates_and_ups = [
            Tensor(f"{name}{which}.weight", "m e", n=n, u=place)
            for n, name in each
            for place, which in enumerate((names.gate, names.up))
        ]
        ups = [Tensor(f"{name}{names.up}.weight", "m e", n=n) for n, name in each]
        downs = [Tensor(f"{name}{names.down}.weight", "e m", n=n) for n, name in each]
        gate_up_biases = [
            Tensor(f"{mlp}experts.{which}.bias", "n m", u=place)
            for place, which in enumerate((names.gate, names.up))
        ]
        down_bias = f"{mlp}experts.{names.down}.bias"
    shared = mlp + names.shared
    return {
        f"{path}router": Weight.of(mlp + names.router, "e n", "n e"),
        f"{path}router_bias": Weight.of(mlp + names.router_bias, "n"),
        f"{path}correction": Weight.of(mlp + names.correction, "n", names.correction_layout),
        f"{path}experts.gate_up": Weight("n e u m", tuple(gates_and_ups)),
        f"{path}experts.up": Weight("n e m", tuple(ups)),
        f"{path}experts.down": Weight("n m e", tuple(downs)),
        f"{path}experts.bgate_up": Weight("n u m", tuple(gate_up_biases)),
        f"{path}experts.bdown": Weight.of(down_bias, "n e"),
        **two_layer_mlp(f"{path}shared", f"{shared}up_proj", f"{shared}down_proj"),
        **gated_mlp(f"{path}shared", shared),
        f"{path}latent_in": Weight.of(mlp + names.latent_in + ".weight", "e l", "l e"),
        f"{path}blatent_in": Weight.of(mlp + names.latent_in + ".bias", "l"),
        f"{path}latent_out": Weight.of(mlp + names.latent_out + ".weight", "l e", "e l"),
        f"{path}blatent_out": Weight.of(mlp + names.latent_out + ".bias"),
        f"{path}shared_gate": Weight.of(mlp + names.shared_gate, "e o", "o e"),
    }
