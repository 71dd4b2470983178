"""The layers that families are made of: norms, attention, MLPs, and how they are put together.

Parameters are stored [in, out], fused where they are used together; each says its logical axes in
its metadata, for `sharding.state_shardings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, final

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig
from jaxserve.models.context import LayerContext
from pallas_kernels import matmul

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {
        "silu": jax.nn.silu,
        "swish": jax.nn.silu,
        "relu": jax.nn.relu,
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_new": partial(jax.nn.gelu, approximate=True),
        "gelu_fast": partial(jax.nn.gelu, approximate=True),
        "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    }
)


def activation_of(given: Mapping[str, Any], field: str, default: str) -> str:
    """The activation that a config.json names in `field`.

    Raises:
      UnsupportedModelError: it is not one of `ACTIVATIONS`.
    """
    name = given.get(field) or default
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{field}={name!r} is not supported; supported are {tuple(ACTIVATIONS)}"
        )
    return name


@final
class ParamMaker:
    """Makes parameters that know their logical axes; with `layers`, stacked along a first axis.

    Args:
      rngs: for random weights; None makes zeros of them.
    """

    def __init__(
        self, rngs: nnx.Rngs | None, dtype: jax.typing.DTypeLike, layers: int | None = None
    ):
        self._rngs = rngs
        self._dtype = dtype
        self._layers = layers

    def ones(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> nnx.Param:
        axes, shape = self._stacked(axes, shape)
        return nnx.Param(jnp.ones(shape, self._dtype), logical_axes=axes)

    def zeros(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> nnx.Param:
        axes, shape = self._stacked(axes, shape)
        return nnx.Param(jnp.zeros(shape, self._dtype), logical_axes=axes)

    def normal(
        self, axes: tuple[str | None, ...], shape: tuple[int, ...], *, fan_in: int | None = None
    ) -> nnx.Param:
        """Normal with 1 / sqrt(fan_in); the first axis is what a product sums over by default."""
        if self._rngs is None:
            return self.zeros(axes, shape)
        scale = (fan_in or shape[0]) ** -0.5
        axes, shape = self._stacked(axes, shape)
        value = jax.random.normal(self._rngs.params(), shape, self._dtype)
        return nnx.Param(value * jnp.asarray(scale, self._dtype), logical_axes=axes)

    def _stacked(
        self, axes: tuple[str | None, ...], shape: tuple[int, ...]
    ) -> tuple[tuple[str | None, ...], tuple[int, ...]]:
        if self._layers is None:
            return axes, shape
        return ("layers", *axes), (self._layers, *shape)


class Norm(Protocol):
    """A norm over the last axis."""

    def __init__(self, config: DecoderConfig, new: ParamMaker): ...

    def __call__(self, x: jax.Array) -> jax.Array: ...


class MLP(Protocol):
    """What follows the attention in a layer: [tokens, embed] to the same."""

    def __init__(self, config: DecoderConfig, new: ParamMaker): ...

    def __call__(self, x: jax.Array) -> jax.Array: ...


@final
class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis; `scale` [embed], or [head_dim] with `of_heads`."""

    def __init__(self, config: DecoderConfig, new: ParamMaker, *, of_heads: bool = False):
        axis, size = (None, config.head_dim) if of_heads else ("embed", config.hidden_size)
        self.scale = (new.zeros if config.norm_offset == 1 else new.ones)((axis,), (size,))
        self.eps, self.offset = config.norm_eps, config.norm_offset

    def __call__(self, x: jax.Array) -> jax.Array:
        """In float32; returns x's dtype."""
        wide = x.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32) + self.offset
        return (wide * scale).astype(x.dtype)


@final
class LayerNorm(nnx.Module):
    """Mean and variance norm over the last axis; `scale` and `bias` [embed]."""

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        self.scale = new.ones(("embed",), (config.hidden_size,))
        self.bias = new.zeros(("embed",), (config.hidden_size,))
        self.eps = config.norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """In float32; returns x's dtype."""
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        scale, bias = (p[...].astype(jnp.float32) for p in (self.scale, self.bias))
        return (wide * scale + bias).astype(x.dtype)


@final
class Attention(nnx.Module):
    """Grouped-query self-attention over the paged cache.

    wqkv   [embed, kv_heads, group + 2, head_dim]   a KV head: its queries, k, v
    wo     [kv_heads, group, head_dim, embed]
    bqkv, bo, q_norm, k_norm                        where the config has them
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        self.config = config
        embed, head_dim = config.hidden_size, config.head_dim
        kv_heads, group = config.num_kv_heads, config.group
        self.wqkv = new.normal(
            ("embed", "kv_heads", None, None), (embed, kv_heads, group + 2, head_dim)
        )
        self.wo = new.normal(
            ("kv_heads", None, None, "embed"),
            (kv_heads, group, head_dim, embed),
            fan_in=kv_heads * group * head_dim,
        )
        if config.qkv_bias:
            self.bqkv = new.zeros(("kv_heads", None, None), (kv_heads, group + 2, head_dim))
        if config.o_bias:
            self.bo = new.zeros(("embed",), (embed,))
        if config.qk_norm:
            self.q_norm = RMSNorm(config, new, of_heads=True)
            self.k_norm = RMSNorm(config, new, of_heads=True)

    def __call__(self, x: jax.Array, context: LayerContext) -> jax.Array:
        """`x` [tokens, embed], normed, to what the attention adds to the residual."""
        config = self.config
        group, head_dim = config.group, config.head_dim
        qkv = matmul(x, self.wqkv[...])  # [tokens, kv_heads, group + 2, head_dim]
        if config.qkv_bias:
            qkv = qkv + self.bqkv[...]
        if config.qk_norm:
            q, k, v = jnp.split(qkv, (group, group + 1), axis=2)
            qkv = jnp.concatenate([self.q_norm(q), self.k_norm(k), v], axis=2)
        out = context.attend(qkv, scale=config.attention_scale, soft_cap=config.attention_soft_cap)
        out = out.reshape(-1, config.num_heads * head_dim)
        out = matmul(out, self.wo[...].reshape(-1, config.hidden_size))
        return out + self.bo[...] if config.o_bias else out


@final
class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)).

    gate_up   [embed, 2, mlp]
    down      [mlp, embed]
    bgate_up, bdown            where the config has biases
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        self.config = config
        embed, mlp = config.hidden_size, config.intermediate_size
        self.gate_up = new.normal(("embed", None, "mlp"), (embed, 2, mlp))
        self.down = new.normal(("mlp", "embed"), (mlp, embed))
        if config.mlp_bias:
            self.bgate_up = new.zeros((None, "mlp"), (2, mlp))
            self.bdown = new.zeros(("embed",), (embed,))

    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        both = matmul(x, self.gate_up[...])  # [tokens, 2, mlp]
        if config.mlp_bias:
            both = both + self.bgate_up[...]
        out = matmul(ACTIVATIONS[config.activation](both[:, 0]) * both[:, 1], self.down[...])
        return out + self.bdown[...] if config.mlp_bias else out


@final
class TwoLayerMLP(nnx.Module):
    """down(activation(up(x))).

    up     [embed, mlp]
    down   [mlp, embed]
    bup, bdown            where the config has biases
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        self.config = config
        embed, mlp = config.hidden_size, config.intermediate_size
        self.up = new.normal(("embed", "mlp"), (embed, mlp))
        self.down = new.normal(("mlp", "embed"), (mlp, embed))
        if config.mlp_bias:
            self.bup = new.zeros(("mlp",), (mlp,))
            self.bdown = new.zeros(("embed",), (embed,))

    def __call__(self, x: jax.Array) -> jax.Array:
        bias, activation = self.config.mlp_bias, ACTIVATIONS[self.config.activation]
        x = matmul(x, self.up[...])
        out = matmul(activation(x + self.bup[...] if bias else x), self.down[...])
        return out + self.bdown[...] if bias else out


class Block(nnx.Module):
    """One layer: attention, then an MLP, each over a norm of the residual.

    Families set the two classes, and override `__call__` where they are put together otherwise.
    With a `ParamMaker` that stacks, it holds all layers' parameters, of which a scan hands in one.
    """

    norm_class: ClassVar[type[Norm]]
    mlp_class: ClassVar[type[MLP]]

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        self.attention_norm = self.norm_class(config, new)
        self.attention = Attention(config, new)
        self.mlp_norm = self.norm_class(config, new)
        self.mlp = self.mlp_class(config, new)

    def __call__(self, x: jax.Array, context: LayerContext) -> jax.Array:
        """The residual stream [tokens, embed] after this layer."""
        x = x + self.attention(self.attention_norm(x), context)
        return x + self.mlp(self.mlp_norm(x))


def soft_capped(x: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(x / cap), and `x` itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)
