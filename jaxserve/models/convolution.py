"""Causal convolutions over the last inputs of each channel, whose window is a part of a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig
from jaxserve.models.context import LayerContext
from jaxserve.models.linear import Linear
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.recurrence import Advances, Arrays, Inputs, State
from jaxserve.models.weights import Weight
from jaxserve.sharding.shards import whole


def check_kernel_size(size: int) -> None:
    """Raise UnsupportedModelError for a convolution that sees only one input."""
    if size < 2:
        raise UnsupportedModelError(
            f"a convolution over {size} inputs: only 2 or more are supported"
        )


@final
class CausalConvolution(nnx.Module):
    """A convolution of each channel with its own kernel.

    kernel  [kernel, 1, channels]    the last one belongs to the token itself
    bias    [channels]               optional
    """

    def __init__(self, kernel_size: int, channels: int, new: ParamMaker, *, has_bias: bool):
        self.kernel = new.table((None, None, None), (kernel_size, 1, channels))
        self.bias = new.zeros((None,), (channels,)) if has_bias else None

    def __call__(
        self,
        window: Float[Array, "window channels"],
        inputs: Float[Array, "tokens channels"],
        count: Int32[Array, ""],
    ) -> tuple[Float32[Array, "tokens channels"], Float[Array, "window channels"]]:
        """Return the outputs of `inputs` after the `window` of earlier ones, and the new window.

        `count` inputs are valid; those after them are not in the new window.
        """
        num_tokens = inputs.shape[0]
        kernel = self.kernel[...].astype(jnp.float32)
        seen = jnp.concatenate([window, inputs])
        wide = seen.astype(jnp.float32)
        out = sum(
            (wide[tap : tap + num_tokens] * kernel[tap] for tap in range(kernel.shape[0])),
            start=jnp.zeros(inputs.shape),
        )
        if self.bias is not None:
            out = out + self.bias[...].astype(jnp.float32)
        return out, lax.dynamic_slice_in_dim(seen, count, window.shape[0])


@final
@dataclass(frozen=True, kw_only=True)
class ConvolutionSizes:
    """The sizes of a short convolution; see `Recurrence`."""

    channels: int
    kernel_size: int  # inputs that the convolution sees
    has_bias: bool  # of the convolution and of both projections

    def __post_init__(self) -> None:
        check_kernel_size(self.kernel_size)

    def mixer(self, config: DecoderConfig, new: ParamMaker) -> GatedConvolution:
        return GatedConvolution(config, new)

    def arrays(self, dtype: jax.typing.DTypeLike) -> Arrays:
        """Return `Recurrence.arrays`."""
        return {"window": ((self.kernel_size - 1, self.channels), dtype)}


@final
class GatedConvolution(nnx.Module):
    """A mixer of LFM2: out(c * convolution(b * x)), where b, c and x are projections.

    project      [embed, 3, channels]    b, c, x
    convolution                          a `CausalConvolution` over b * x
    out          [channels, embed]
    bproject, bout                       if the sizes have biases
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        assert isinstance(config.recurrence, ConvolutionSizes)
        self.sizes = sizes = config.recurrence
        self.dtype = config.dtype
        embed, channels = config.hidden_size, sizes.channels
        self.project = new.weight(("embed", None, "channels"), (embed, 3, channels))
        self.convolution = CausalConvolution(
            sizes.kernel_size, channels, new, has_bias=sizes.has_bias
        )
        self.out = new.weight(("channels", "embed"), (channels, embed))
        self.bproject = new.zeros((None, None), (3, channels)) if sizes.has_bias else None
        self.bout = new.zeros(("embed",), (embed,)) if sizes.has_bias else None

    @property
    def advances(self) -> Advances:
        return ((self._advance, self.sizes.arrays(self.dtype)),)

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        """Return the mixer's addition to the residual stream, for `x` after the norm."""
        projected = whole(Linear(self.project, self.bproject)(x, context.adapter))
        b, c, x = projected[:, 0], projected[:, 1], projected[:, 2]
        y = context.recur(*self.advances[0], {"inputs": b * x})
        gated = (c.astype(jnp.float32) * y).astype(self.dtype)
        return Linear(self.out, self.bout)(gated, context.adapter)

    def _advance(
        self, state: State, inputs: Inputs, count: Int32[Array, ""]
    ) -> tuple[Float32[Array, "tokens channels"], State]:
        y, window = self.convolution(state["window"], inputs["inputs"], count)
        return y, {"window": window}


def convolution_weights(path: str, name: str) -> dict[str, Weight]:
    """Return both parameters of a `CausalConvolution` at `path`, from the tensors of `name`."""
    return {
        f"{path}.kernel": Weight.of(f"{name}.weight", "k o c", "c o k"),
        f"{path}.bias": Weight.of(f"{name}.bias", "c"),
    }
