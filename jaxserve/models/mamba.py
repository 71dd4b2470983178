"""Mamba-2, a selective state-space layer (Dao and Gu, arXiv:2405.21060).

A head has a memory M [head_dim, state], and a token changes and reads it:

  M = exp(step * A) * M + step * x B^T        y = M C + D x

x, B and C come from a short causal convolution over the layer's inputs, and `step` from a softplus.
Several tokens are computed at once as products of matrices (section 6 of the paper).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig
from jaxserve.models.context import LayerContext
from jaxserve.models.convolution import CausalConvolution, check_kernel_size, convolution_weights
from jaxserve.models.linear import Linear
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.recurrence import Advances, Arrays, Inputs, State, computed_once
from jaxserve.models.weights import Weight
from jaxserve.sharding.shards import whole


@final
@dataclass(frozen=True, kw_only=True)
class Mamba2Sizes:
    """The sizes of a Mamba-2 layer; see `Recurrence`."""

    # num_heads, head_dim: of the memory; their product is the layer's inner width.
    num_heads: int
    head_dim: int
    state_size: int  # columns of a head's memory
    num_groups: int  # heads of a group share B and C, and the norm of the outputs is over a group
    kernel_size: int  # inputs that the convolution sees
    # has_bias, has_conv_bias: whether the projections, and the convolution, have biases.
    has_bias: bool = False
    has_conv_bias: bool = True
    has_out_bias: bool | None = None  # of the last projection, if it differs from `has_bias`
    # norm: whether there is a gated norm, and whether the gate comes before or after it.
    norm: Literal["after_gate", "before_gate"] | None = "after_gate"
    # Factors of gate, x, B, C and step after the first projection.
    factors: tuple[float, float, float, float, float] | None = None
    # min_step, max_step: bounds of the step.
    min_step: float = 0.0
    max_step: float = float("inf")

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise UnsupportedModelError(
                f"{self.num_heads} heads of Mamba in {self.num_groups} groups: the number of heads "
                "must be a multiple of the number of groups"
            )
        check_kernel_size(self.kernel_size)

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """The width of the convolution: x, B and C."""
        return self.inner + 2 * self.num_groups * self.state_size

    def mixer(self, config: DecoderConfig, new: ParamMaker) -> Mamba2Mixer:
        return Mamba2Mixer(config, new)

    def arrays(self, dtype: jax.typing.DTypeLike) -> Arrays:
        """Return `Recurrence.arrays`. The memory is a long sum, so it is in float32."""
        return {
            "window": ((self.kernel_size - 1, self.channels), dtype),
            "memory": ((self.num_heads, self.head_dim, self.state_size), jnp.float32),
        }


@final
class Mamba2Mixer(nnx.Module):
    """The part of a layer that mixes tokens, instead of attention.

    project      [embed, inner + channels + heads]   gate; x, B and C; step
    convolution                  a `CausalConvolution` over x, B and C
    out          [inner, embed]
    scale        [inner]    of the gated norm, if there is one
    a_log, skip, step_bias  [heads], float32
    bproject, bout                                   if the sizes have biases
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        assert isinstance(config.recurrence, Mamba2Sizes)
        self.sizes = sizes = config.recurrence
        self.dtype, self.eps = config.dtype, config.norm_eps
        embed, inner, heads = config.hidden_size, sizes.inner, sizes.num_heads
        width = inner + sizes.channels + heads
        wide = new.with_dtype("float32")
        self.project = new.weight(("embed", "channels"), (embed, width))
        self.convolution = CausalConvolution(
            sizes.kernel_size, sizes.channels, new, has_bias=sizes.has_conv_bias
        )
        self.out = new.weight(("channels", "embed"), (inner, embed))
        self.scale = None if sizes.norm is None else new.ones((None,), (inner,))
        self.a_log = wide.zeros((None,), (heads,))
        self.skip = wide.ones((None,), (heads,))
        self.step_bias = wide.zeros((None,), (heads,))
        self.bproject = new.zeros((None,), (width,)) if sizes.has_bias else None
        has_out_bias = sizes.has_bias if sizes.has_out_bias is None else sizes.has_out_bias
        self.bout = new.zeros(("embed",), (embed,)) if has_out_bias else None

    @property
    def advances(self) -> Advances:
        return ((self._advance, self.sizes.arrays(self.dtype)),)

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        """Return the mixer's addition to the residual stream, for `x` after the norm."""
        sizes = self.sizes
        projected = whole(Linear(self.project, self.bproject)(x, context.adapter))
        if sizes.factors is not None:
            states = sizes.num_groups * sizes.state_size
            widths = (sizes.inner, sizes.inner, states, states, sizes.num_heads)
            factors = np.repeat(np.asarray(sizes.factors, np.float32), widths)
            projected = (projected.astype(jnp.float32) * factors).astype(self.dtype)
        borders = [sizes.inner, sizes.inner + sizes.channels]
        gate, inputs, step = whole(jnp.split(projected, borders, axis=-1))
        y = context.recur(*self.advances[0], {"inputs": inputs, "step": step})
        gated = self._gated_norm(y, gate.astype(jnp.float32)).astype(self.dtype)
        return Linear(self.out, self.bout)(gated, context.adapter)

    def _gated_norm(
        self, y: Float32[Array, "tokens inner"], gate: Float32[Array, "tokens inner"]
    ) -> Float32[Array, "tokens inner"]:
        """Return y * silu(gate), with an RMS norm over the heads of each group if there is one."""
        gate = jax.nn.silu(gate)
        if self.scale is None:
            return y * gate
        is_first = self.sizes.norm == "before_gate"
        y = y if is_first else y * gate
        groups = y.reshape(y.shape[0], self.sizes.num_groups, -1)
        mean = jnp.mean(jnp.square(groups), axis=-1, keepdims=True)
        normed = (groups * lax.rsqrt(mean + self.eps)).reshape(y.shape)
        normed = normed * self.scale[...].astype(jnp.float32)
        return normed * gate if is_first else normed

    def _advance(
        self, state: State, inputs: Inputs, count: Int32[Array, ""]
    ) -> tuple[Float32[Array, "tokens inner"], State]:
        sizes = self.sizes
        num_tokens = inputs["inputs"].shape[0]
        convolved, window = self.convolution(state["window"], inputs["inputs"], count)
        borders = [sizes.inner, sizes.inner + sizes.num_groups * sizes.state_size]
        x, b, c = whole(jnp.split(jax.nn.silu(convolved), borders, axis=-1))
        step = jax.nn.softplus(inputs["step"].astype(jnp.float32) + self.step_bias[...])
        step = jnp.clip(step, sizes.min_step, sizes.max_step)
        step = jnp.where(jnp.arange(num_tokens)[:, None] < count, step, 0.0)
        y, memory = self._scanned(
            x.reshape(num_tokens, sizes.num_groups, -1, sizes.head_dim),
            b.reshape(num_tokens, sizes.num_groups, -1),
            c.reshape(num_tokens, sizes.num_groups, -1),
            step.reshape(num_tokens, sizes.num_groups, -1),
            state["memory"],
        )
        return y, {"window": window, "memory": memory}

    def _scanned(
        self,
        x: Float32[Array, "tokens groups group head_dim"],
        b: Float32[Array, "tokens groups state"],
        c: Float32[Array, "tokens groups state"],
        step: Float32[Array, "tokens groups group"],
        memory: Float32[Array, "heads head_dim state"],
    ) -> tuple[Float32[Array, "tokens inner"], Float32[Array, "heads head_dim state"]]:
        """Return outputs and memory after tokens of one sequence; a step of 0 changes nothing.

        A token reads the memory before all of them, and the additions of each token up to itself,
        both decayed since then.
        """
        num_tokens = x.shape[0]
        # Groups come first, because XLA's products on the CPU are slow with batch axes elsewhere.
        x, b, c = x.transpose(1, 2, 0, 3), b.swapaxes(0, 1), c.swapaxes(0, 1)
        step = step.transpose(1, 2, 0)
        grouped = step.shape[:2]
        rate = -jnp.exp(self.a_log[...]).reshape(*grouped, 1)
        # Logarithms of what remains of the first memory after each token.
        decay = jnp.cumsum(step * rate, axis=-1)
        kept = computed_once(jnp.exp(decay))[..., None]
        old = memory.reshape(*grouped, *memory.shape[1:])
        flat = memory.reshape(grouped[0], -1, memory.shape[-1])
        read = jnp.einsum("gns,gts->gnt", flat, c).reshape(*old.shape[:3], num_tokens)
        y = kept * read.swapaxes(2, 3) + x * self.skip[...].reshape(*grouped, 1, 1)
        added = x * (step * jnp.exp(decay[..., -1:] - decay))[..., None]
        if num_tokens == 1:
            y += jnp.sum(b * c, axis=-1)[:, None, :, None] * added
            first, second = computed_once(added), computed_once(b)
            new = kept * old + first.swapaxes(2, 3) * second[:, None]
        else:
            order = jnp.arange(num_tokens)
            between = decay[..., :, None] - decay[..., None, :]
            between = jnp.exp(jnp.where(order[:, None] >= order, between, -jnp.inf))
            weights = jnp.einsum("gts,gus->gtu", c, b)[:, None] * between * step[:, :, None]
            y += jnp.einsum("gmtu,gmup->gmtp", weights, x)
            new = kept[:, :, -1:] * old
            new += jnp.einsum("gtn,gts->gns", _by_token(added), b).reshape(old.shape)
        return y.transpose(2, 0, 1, 3).reshape(num_tokens, -1), new.reshape(memory.shape)


def _by_token(
    x: Float32[Array, "groups group tokens head_dim"],
) -> Float32[Array, "groups tokens inner"]:
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def mixer_weights(path: str, name: str) -> dict[str, Weight]:
    """Return the weights of a `Mamba2Mixer` under transformers' names."""
    return {
        f"{path}project": Weight.of(name + "in_proj.weight", "e w", "w e"),
        f"{path}bproject": Weight.of(name + "in_proj.bias", "w"),
        **convolution_weights(f"{path}convolution", name + "conv1d"),
        f"{path}out": Weight.of(name + "out_proj.weight", "i e", "e i"),
        f"{path}bout": Weight.of(name + "out_proj.bias"),
        f"{path}scale": Weight.of(name + "norm.weight", "i"),
        f"{path}a_log": Weight.of(name + "A_log", "h"),
        f"{path}skip": Weight.of(name + "D", "h"),
        f"{path}step_bias": Weight.of(name + "dt_bias", "h"),
    }


def step_limits(given: Mapping[str, Any]) -> tuple[float, float]:
    """Return the bounds of the step from a config.json.

    transformers 5 writes infinity as a dictionary, {"__float__": "Infinity"}, and 4 as a number.
    """
    low, high = (
        float(each["__float__"] if isinstance(each, Mapping) else each)
        for each in given["time_step_limit"] or (0.0, float("inf"))
    )
    return low, high
