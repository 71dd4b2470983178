"""A causal convolution over the last inputs of each channel, whose window is a part of a state."""

from __future__ import annotations

from typing import final

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.weights import Weight


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


def convolution_weights(path: str, name: str) -> dict[str, Weight]:
    """Return both parameters of a `CausalConvolution` at `path`, from the tensors of `name`."""
    return {
        f"{path}.kernel": Weight.of(f"{name}.weight", "k o c", "c o k"),
        f"{path}.bias": Weight.of(f"{name}.bias", "c"),
    }
