"""Norms over the last axis; they compute in float32 and return their input's dtype."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol, final

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.kernels import RMSScale, layer_norm, rms_norm
from jaxserve.models.config import DecoderConfig, NormKind
from jaxserve.models.linear import SumsRows
from jaxserve.models.param_maker import ParamMaker


class Norm(Protocol):
    """A norm over the last axis."""

    def __init__(self, config: DecoderConfig, new: ParamMaker): ...

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]: ...


@final
class RMSNorm(SumsRows):
    """Root-mean-square norm; `scale` [embed], or [head_dim] with `of_heads`."""

    def __init__(self, config: DecoderConfig, new: ParamMaker, *, of_heads: bool = False):
        axis, size = (None, config.head_dim) if of_heads else ("embed", config.hidden_size)
        self.scale = (new.zeros if config.norm_offset == 1 else new.ones)((axis,), (size,))
        self.eps, self.offset = config.norm_eps, config.norm_offset

    @property
    def as_scale(self) -> RMSScale:
        """The norm as an argument of `jaxserve.kernels.fused_matmul`."""
        return RMSScale(self.scale[...], self.eps, self.offset)

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return rms_norm(
            x, self.scale[...], eps=self.eps, offset=self.offset, implementation=self.row_kernels
        )


@final
class UnitRMSNorm(SumsRows):
    """Root-mean-square norm without parameters."""

    def __init__(self, config: DecoderConfig):
        self.eps = config.norm_eps

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        ones = jnp.ones(x.shape[-1:], x.dtype)
        return rms_norm(x, ones, eps=self.eps, implementation=self.row_kernels)


@final
class WideRMSNorm(SumsRows):
    """Root-mean-square norm over all heads of a token; `scale` [kv_heads, num_heads, head_dim].

    `num_heads` are those of one KV head: its queries, or its key.
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker, *, num_heads: int):
        shape = (config.num_kv_heads, num_heads, config.head_dim)
        self.scale = new.ones(("kv_heads", None, None), shape)
        self.eps = config.norm_eps

    def __call__(
        self, x: Float[Array, "tokens kv_heads heads head_dim"]
    ) -> Float[Array, "tokens kv_heads heads head_dim"]:
        flat, scale = x.reshape(x.shape[0], -1), self.scale[...].reshape(-1)
        kernels = self.row_kernels
        return rms_norm(flat, scale, eps=self.eps, implementation=kernels).reshape(x.shape)


@final
class HeadLayerNorm(SumsRows):
    """Mean and variance norm of each head without a bias; `scale` [kv_heads, num_heads, head_dim].

    `num_heads` are those of one KV head: its queries, or its key.
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker, *, num_heads: int):
        shape = (config.num_kv_heads, num_heads, config.head_dim)
        self.scale = new.ones(("kv_heads", None, None), shape)
        self.eps = config.norm_eps

    def __call__(
        self, x: Float[Array, "tokens kv_heads heads head_dim"]
    ) -> Float[Array, "tokens kv_heads heads head_dim"]:
        one = jnp.ones(x.shape[-1:], x.dtype)
        plain = layer_norm(x, one, 0 * one, eps=self.eps, implementation=self.row_kernels)
        return plain * self.scale[...]


@final
class LayerNorm(SumsRows):
    """Mean and variance norm; `scale` [embed], and `bias` [embed] if the config has `norm_bias`."""

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        self.scale = (new.zeros if config.norm_offset == 1 else new.ones)(
            ("embed",), (config.hidden_size,)
        )
        self.bias = new.zeros(("embed",), (config.hidden_size,)) if config.norm_bias else None
        self.eps, self.offset = config.norm_eps, config.norm_offset

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        scale = self.scale[...]
        scale = scale if self.offset == 0 else scale + jnp.asarray(self.offset, scale.dtype)
        bias = jnp.zeros_like(scale) if self.bias is None else self.bias[...]
        return layer_norm(x, scale, bias, eps=self.eps, implementation=self.row_kernels)


@final
class BareLayerNorm(SumsRows):
    """Mean and variance norm without parameters."""

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        self.eps = config.norm_eps

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        one = jnp.ones(x.shape[-1:], x.dtype)
        return layer_norm(x, one, 0 * one, eps=self.eps, implementation=self.row_kernels)


NORMS: Mapping[NormKind, type[Norm]] = MappingProxyType(
    {"rms": RMSNorm, "layer": LayerNorm, "bare_layer": BareLayerNorm}
)
