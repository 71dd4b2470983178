"""Mamba, a selective state-space layer (Gu and Dao, arXiv:2312.00752).

A channel has a memory m [state], and a token changes and reads it:

  m = exp(step * A) * m + step * x B        y = C m + D x

x comes from a short causal convolution over the layer's inputs. B, C and the step of each channel
are projections of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.models.config import DecoderConfig
from jaxserve.models.context import LayerContext
from jaxserve.models.convolution import CausalConvolution, check_kernel_size, convolution_weights
from jaxserve.models.linear import Linear
from jaxserve.models.norms import RMSNorm, UnitRMSNorm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.recurrence import Advances, Arrays, Inputs, State
from jaxserve.models.weights import Weight
from jaxserve.sharding.shards import whole


@final
@dataclass(frozen=True, kw_only=True)
class Mamba1Sizes:
    """The sizes of a Mamba layer; see `Recurrence`.

    Attributes:
      inner: the number of channels.
      state_size: the numbers of a channel's memory.
      step_rank: the size of a token's steps before they become those of channels.
      kernel_size: inputs that the convolution sees.
      has_bias, has_conv_bias: whether the outer projections, and the convolution, have biases.
      norm: whether step, B and C have RMS norms, and whether these have scales.
      norm_eps: the epsilon of these norms.
    """

    inner: int
    state_size: int
    step_rank: int
    kernel_size: int
    has_bias: bool = False
    has_conv_bias: bool = True
    norm: Literal["scaled", "unit"] | None = None
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_kernel_size(self.kernel_size)

    def mixer(self, config: DecoderConfig, new: ParamMaker) -> Mamba1Mixer:
        return Mamba1Mixer(config, new)

    def arrays(self, dtype: jax.typing.DTypeLike) -> Arrays:
        """Return `Recurrence.arrays`. The memory is a long sum, so it is in float32."""
        return {
            "window": ((self.kernel_size - 1, self.inner), dtype),
            "memory": ((self.inner, self.state_size), jnp.float32),
        }


@final
class Mamba1Mixer(nnx.Module):
    """The part of a layer that mixes tokens, instead of attention.

    project      [embed, 2 * inner]            x and gate
    convolution                                a `CausalConvolution` over x
    select       [inner, step_rank + 2 * state]    step, B and C
    step         [step_rank, inner]
    out          [inner, embed]
    a_log        [inner, state], float32
    skip, step_bias  [inner], float32
    bproject, bout   and step_norm, b_norm, c_norm if the sizes have them
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        assert isinstance(config.recurrence, Mamba1Sizes)
        self.sizes = sizes = config.recurrence
        self.dtype = config.dtype
        embed, inner = config.hidden_size, sizes.inner
        widths = sizes.step_rank, sizes.state_size, sizes.state_size
        wide = new.with_dtype("float32")
        self.project = new.weight(("embed", "channels"), (embed, 2 * inner))
        self.convolution = CausalConvolution(
            sizes.kernel_size, inner, new, has_bias=sizes.has_conv_bias
        )
        self.select = new.weight((None, None), (inner, sum(widths)))
        self.step = new.weight((None, None), (sizes.step_rank, inner))
        self.out = new.weight(("channels", "embed"), (inner, embed))
        self.a_log = wide.zeros((None, None), (inner, sizes.state_size))
        self.skip = wide.ones((None,), (inner,))
        self.step_bias = wide.zeros((None,), (inner,))
        self.bproject = new.zeros((None,), (2 * inner,)) if sizes.has_bias else None
        self.bout = new.zeros(("embed",), (embed,)) if sizes.has_bias else None
        if sizes.norm is not None:
            owns = [replace(config, hidden_size=n, norm_eps=sizes.norm_eps) for n in widths]
            self.step_norm, self.b_norm, self.c_norm = (
                RMSNorm(own, new) if sizes.norm == "scaled" else UnitRMSNorm(own) for own in owns
            )

    @property
    def advances(self) -> Advances:
        # The convolution advances its window, and then the scan its memory.
        window, memory = ({name: own} for name, own in self.sizes.arrays(self.dtype).items())
        return (self._convolve, window), (self._scan, memory)

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        """Return the mixer's addition to the residual stream, for `x` after the norm."""
        sizes, adapter = self.sizes, context.adapter
        projected = whole(Linear(self.project, self.bproject)(x, adapter))
        x, gate = whole(jnp.split(projected, 2, axis=-1))
        convolve, scan = self.advances
        x = whole(context.recur(*convolve, {"x": x}).astype(self.dtype))
        borders = (sizes.step_rank, sizes.step_rank + sizes.state_size)
        step, b, c = jnp.split(Linear(self.select)(x, adapter), borders, axis=-1)
        if sizes.norm is not None:
            step, b, c = self.step_norm(step), self.b_norm(b), self.c_norm(c)
        inputs = {"x": x, "step": Linear(self.step)(step, adapter), "b": b, "c": c}
        y = context.recur(*scan, inputs)
        gated = (y * jax.nn.silu(gate.astype(jnp.float32))).astype(self.dtype)
        return Linear(self.out, self.bout)(gated, adapter)

    def _convolve(
        self, state: State, inputs: Inputs, count: Int32[Array, ""]
    ) -> tuple[Float32[Array, "tokens inner"], State]:
        convolved, window = self.convolution(state["window"], inputs["x"], count)
        return jax.nn.silu(convolved), {"window": window}

    def _scan(
        self, state: State, inputs: Inputs, count: Int32[Array, ""]
    ) -> tuple[Float32[Array, "tokens inner"], State]:
        """Return outputs and memory after tokens of one sequence; a step of 0 changes nothing."""
        x, step, b, c = (inputs[name].astype(jnp.float32) for name in ("x", "step", "b", "c"))
        step = jax.nn.softplus(step + self.step_bias[...])
        step = jnp.where(jnp.arange(len(step))[:, None] < count, step, 0.0)
        kept = jnp.exp(step[..., None] * -jnp.exp(self.a_log[...]))
        added = (step * x)[..., None] * b[:, None]
        added = added.at[0].add(kept[0] * state["memory"])

        def join(first: tuple[Array, Array], then: tuple[Array, Array]) -> tuple[Array, Array]:
            return first[0] * then[0], then[0] * first[1] + then[1]

        _, memories = lax.associative_scan(join, (kept, added))
        y = jnp.einsum("tis,ts->ti", memories, c) + x * self.skip[...]
        return y, {"memory": memories[-1]}


def mamba1_sizes(
    hidden_size: int, *, expand: int, step_rank: int | str, **more: Any
) -> Mamba1Sizes:
    """Return the sizes by the fields of a config.json; `more` are others of `Mamba1Sizes`."""
    rank = math.ceil(hidden_size / 16) if step_rank == "auto" else int(step_rank)
    return Mamba1Sizes(inner=int(expand * hidden_size), step_rank=rank, **more)


def mixer_weights(path: str, name: str) -> dict[str, Weight]:
    """Return the weights of a `Mamba1Mixer` under transformers' names."""
    return {
        f"{path}project": Weight.of(name + "in_proj.weight", "e w", "w e"),
        f"{path}bproject": Weight.of(name + "in_proj.bias", "w"),
        **convolution_weights(f"{path}convolution", name + "conv1d"),
        f"{path}select": Weight.of(name + "x_proj.weight", "i w", "w i"),
        f"{path}step": Weight.of(name + "dt_proj.weight", "r i", "i r"),
        f"{path}step_bias": Weight.of(name + "dt_proj.bias", "i"),
        f"{path}out": Weight.of(name + "out_proj.weight", "i e", "e i"),
        f"{path}bout": Weight.of(name + "out_proj.bias"),
        f"{path}a_log": Weight.of(name + "A_log", "i s"),
        f"{path}skip": Weight.of(name + "D", "i"),
        f"{path}step_norm.scale": Weight.of(name + "dt_layernorm.weight"),
        f"{path}b_norm.scale": Weight.of(name + "b_layernorm.weight"),
        f"{path}c_norm.scale": Weight.of(name + "c_layernorm.weight"),
    }
