"""The layers that families consist of: MLPs, and the block that combines a layer's parts.

Parameters are stored [in, out], fused if they are used together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.kernels import gated_silu
from jaxserve.models.attention import Attention
from jaxserve.models.config import DecoderConfig
from jaxserve.models.context import LayerContext
from jaxserve.models.linear import Linear, SumsRows
from jaxserve.models.norms import NORMS, Norm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.projection import Gate, normed, projected

ACTIVATIONS: Mapping[str, Callable[[Float[Array, "*shape"]], Float[Array, "*shape"]]] = (
    MappingProxyType(
        {
            "silu": jax.nn.silu,
            "swish": jax.nn.silu,
            "relu": jax.nn.relu,
            "relu2": lambda x: jnp.square(jax.nn.relu(x)),
            "gelu": partial(jax.nn.gelu, approximate=False),
            "gelu_new": partial(jax.nn.gelu, approximate=True),
            "gelu_fast": partial(jax.nn.gelu, approximate=True),
            "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
        }
    )
)


def activation_of(given: Mapping[str, Any], field: str) -> str:
    """Return the activation in `field`; raise UnsupportedModelError if not in `ACTIVATIONS`."""
    name = given[field]
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{field}={name!r} is not supported; supported are {tuple(ACTIVATIONS)}"
        )
    return name


class Sublayer(Protocol):
    """Attention or the MLP of a layer."""

    def __init__(self, config: DecoderConfig, new: ParamMaker): ...

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        context: LayerContext,
        *,
        norm: Norm | None = None,
        residual: Float[Array, "tokens embed"] | None = None,
    ) -> Float[Array, "tokens embed"]:
        """Return the addition to the residual stream, or with `residual` their sum.

        `norm` is applied to `x` first.
        """
        ...


@final
class GatedMLP(SumsRows):
    """down(activation(gate(x)) * up(x)).

    gate_up   [embed, 2, mlp]
    down      [mlp, embed]
    bgate_up, bdown            if the config has biases

    Args:
      gate: another function of gate and up; hashable.
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker, *, gate: Gate | None = None):
        self.activation, self.down_dtype, self.gate = config.activation, config.down_dtype, gate
        embed, mlp = config.hidden_size, config.intermediate_size
        self.gate_up = new.weight(("embed", None, "mlp"), (embed, 2, mlp))
        self.down = new.with_dtype(config.down_dtype).weight(("mlp", "embed"), (mlp, embed))
        has_bias = config.mlp_bias
        self.bgate_up = new.zeros((None, "mlp"), (2, mlp)) if has_bias else None
        self.bdown = new.zeros(("embed",), (embed,)) if has_bias else None

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        context: LayerContext,
        *,
        norm: Norm | None = None,
        residual: Float[Array, "tokens embed"] | None = None,
    ) -> Float[Array, "tokens embed"]:
        linear = Linear(self.gate_up, self.bgate_up, row_kernels=self.row_kernels)
        gate = self.gate or gate_of(self.activation)
        return _down(
            self, projected(linear, x, context.adapter, norm=norm, gate=gate), context, residual
        )


class TwoLayerMLP(SumsRows):
    """down(activation(up(x))).

    up     [embed, mlp]
    down   [mlp, embed]
    bup, bdown            if the config has biases
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        self.activation, self.down_dtype = config.activation, config.down_dtype
        embed, mlp = config.hidden_size, config.intermediate_size
        self.up = new.weight(("embed", "mlp"), (embed, mlp))
        self.down = new.with_dtype(config.down_dtype).weight(("mlp", "embed"), (mlp, embed))
        has_bias = config.mlp_bias
        self.bup = new.zeros(("mlp",), (mlp,)) if has_bias else None
        self.bdown = new.zeros(("embed",), (embed,)) if has_bias else None

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        context: LayerContext,
        *,
        norm: Norm | None = None,
        residual: Float[Array, "tokens embed"] | None = None,
    ) -> Float[Array, "tokens embed"]:
        linear = Linear(self.up, self.bup, row_kernels=self.row_kernels)
        x = self._activated(projected(linear, x, context.adapter, norm=norm))
        return _down(self, x, context, residual)

    def _activated(self, x: Float[Array, "tokens mlp"]) -> Float[Array, "tokens mlp"]:
        return ACTIVATIONS[self.activation](x)


def gate_of(activation: str) -> Gate:
    """Return the function activation(both[:, 0]) * both[:, 1] of an array [tokens, 2, mlp]."""
    function = ACTIVATIONS[activation]
    if function is jax.nn.silu:
        return gated_silu
    return lambda both: function(both[:, 0]) * both[:, 1]


def _down(
    mlp: GatedMLP | TwoLayerMLP,
    x: Float[Array, "tokens mlp"],
    context: LayerContext,
    residual: Float[Array, "tokens embed"] | None,
) -> Float[Array, "tokens embed"]:
    """Return the last product of an MLP, plus the residual stream if it is given."""
    x = x if mlp.down_dtype is None else x.astype(mlp.down_dtype)
    linear = Linear(mlp.down, mlp.bdown, row_kernels=mlp.row_kernels)
    return projected(linear, x, context.adapter, residual=residual)


class Block(nnx.Module):
    """One layer: attention and an MLP, with norms of the residual stream, joined by `residual`.

    Families set a class where the configuration does not say enough, and override `__call__` if a
    layer has another structure. With a `ParamMaker` that stacks layers, a block holds the
    parameters of all layers, and a scan passes in those of one.

    Args:
      mlp_class: of a layer with a mixture of experts, in a family that does not set `mlp_class`.
    """

    norm_class: ClassVar[type[Norm] | None] = None  # by default the one of `norm_kind`
    attention_class: ClassVar[type[Sublayer]] = Attention
    mlp_class: ClassVar[type[Sublayer] | None] = None  # by default gated or not, by `is_gated`
    mixer: Any  # the `recurrence.Mixer` of a layer with states

    def __init__(
        self, config: DecoderConfig, new: ParamMaker, *, mlp_class: type[Sublayer] | None = None
    ):
        self.residual, self.residual_scale = config.residual, config.residual_scale
        has_first, has_end = config.norm_places != "after", config.norm_places != "before"
        has_second = has_first and config.residual != "parallel_one_norm"
        self.attention_norm: Any = self.new_norm(config, new) if has_first else None
        self.attention: Any = self.attention_class(config, new)
        self.attention_end_norm: Any = self.new_norm(config, new) if has_end else None
        self.mlp_norm: Any = self.new_norm(config, new) if has_second else None
        self.mlp = self.new_mlp(config, new, mlp_class)
        self.mlp_end_norm: Any = self.new_norm(config, new) if has_end else None

    @classmethod
    def new_norm(cls, config: DecoderConfig, new: ParamMaker) -> Norm:
        return (cls.norm_class or NORMS[config.norm_kind])(config, new)

    @classmethod
    def new_mlp(
        cls, config: DecoderConfig, new: ParamMaker, mlp_class: type[Sublayer] | None
    ) -> Sublayer:
        plain = GatedMLP if config.is_gated else TwoLayerMLP
        return (mlp_class or cls.mlp_class or plain)(config, new)

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        """Return the residual stream after this layer."""
        if self.residual == "parallel_one_norm":
            x_normed = normed(x, self.attention_norm)
            return x + self.attention(x_normed, context) + self.mlp(x_normed, context)
        if self.residual == "parallel":
            attended = self.attention(normed(x, self.attention_norm), context)
            return x + attended + self.mlp(normed(x, self.mlp_norm), context)
        x = self._added(x, context, self.attention, self.attention_norm, self.attention_end_norm)
        return self._added(x, context, self.mlp, self.mlp_norm, self.mlp_end_norm)

    def _added(
        self,
        x: Float[Array, "tokens embed"],
        context: LayerContext,
        part: Sublayer,
        norm: Norm | None,
        end_norm: Norm | None,
    ) -> Float[Array, "tokens embed"]:
        if end_norm is not None:
            return x + scaled(end_norm(part(normed(x, norm), context)), self.residual_scale)
        if self.residual_scale == 1:
            return part(x, context, norm=norm, residual=x)
        return x + scaled(part(x, context, norm=norm), self.residual_scale)


class RecurrentBlock(Block):
    """A `Block` with a mixer instead of attention, the one of the configuration's recurrence.

    A mixer returns its addition to the residual stream, for `(x, context)`, `x` after the norm.
    """

    def __init__(
        self, config: DecoderConfig, new: ParamMaker, *, mlp_class: type[Sublayer] | None = None
    ):
        nnx.Module.__init__(self)  # not `Block`'s, which makes attention
        assert config.recurrence is not None, "a model without recurrent layers"
        self.residual_scale = config.residual_scale
        self.mixer_norm = self.new_norm(config, new)
        self.mixer = config.recurrence.mixer(config, new)
        self.mlp_norm = self.new_norm(config, new)
        self.mlp = self.new_mlp(config, new, mlp_class)

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        x = x + scaled(self.mixer(self.mixer_norm(x), context), self.residual_scale)
        return self._added(x, context, self.mlp, self.mlp_norm, None)


def soft_capped(x: Float[Array, "*shape"], cap: float | None) -> Float[Array, "*shape"]:
    """Return cap * tanh(x / cap), or `x` itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def scaled(x: Float[Array, "*shape"], factor: float) -> Float[Array, "*shape"]:
    """Return x * factor in x's dtype, without rounding the factor to it first."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)
