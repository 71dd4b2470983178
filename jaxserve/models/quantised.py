"""Weights in eight bits."""

from __future__ import annotations

import math
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int8, Int32

from jaxserve.models.linear import WeightAxes
from pallas_kernels import dispatch, matmul, quantize

# Elements of a weight that a product widens at a time.
_TILE_ELEMENTS = 2**22


@final
class QuantisedWeight(nnx.Module):
    """A weight as int8 values with a float32 scale for each output channel.

        values   [*stacked, *in, *out], or [*stacked, *out, *in]: the shape of the dense weight
        scales   [*stacked, *out]

    The dense weight is about `values * scales`, with an error of at most half a scale. A product
    widens the values a tile at a time and multiplies by the scales afterwards, so that no copy of
    the weight in a wider dtype is made. Written in XLA, for every platform.
    """

    def __init__(self, values: nnx.Param, scales: nnx.Param):
        self.values = values
        self.scales = scales

    @classmethod
    def of(cls, dense: nnx.Param, axes: WeightAxes) -> QuantisedWeight:
        """Return a dense weight rounded to 255 levels of each output channel."""
        array, names = dense[...], dense.get_metadata()["logical_axes"]
        stacked, summed, out = axes.split(range(array.ndim))
        order = (*stacked, *out, *summed)
        shape = [array.shape[axis] for axis in order]
        num_channel_axes = len(stacked) + len(out)
        channels = array.transpose(order).reshape(*shape[:num_channel_axes], -1)
        values, scales = quantize(channels, jnp.int8)
        values = values.reshape(shape).transpose(np.argsort(order))
        scale_names = tuple(names[axis] for axis in (*stacked, *out))
        return cls(
            nnx.Param(values, logical_axes=names, has_own_dtype=True),
            nnx.Param(scales, logical_axes=scale_names, has_own_dtype=True),
        )

    def product(
        self,
        x: Float[Array, "tokens *in"],
        adapter: Int32[Array, " tokens"] | None,
        *,
        transposed: bool,
        out_dtype: jax.typing.DTypeLike,
    ) -> Float[Array, " tokens *out"]:
        """See `Representation`."""
        values, scales = self.values[...], self.scales[...]
        x = x.reshape(x.shape[0], -1)
        values = values.reshape((-1, x.shape[1]) if transposed else (x.shape[1], -1))
        out = _product_by_tiles(x, values, transposed) * scales.reshape(-1)
        return out.astype(out_dtype).reshape(-1, *scales.shape)

    def grouped_product(
        self,
        x: Float[Array, "tokens in"],
        sizes: Int32[Array, " matrices"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, " tokens *out"]:
        """See `Representation`. One matrix after the other, each with all tokens."""
        matrices, *out = self.scales.shape
        values = self.values[...].reshape(matrices, x.shape[1], -1)
        scales = self.scales[...].reshape(matrices, -1)
        ends = jnp.cumsum(sizes)
        token = jnp.arange(x.shape[0])

        def one(
            matrix: Int32[Array, ""], outputs: Float[Array, "tokens out"]
        ) -> Float[Array, "tokens out"]:
            is_own = (token >= ends[matrix] - sizes[matrix]) & (token < ends[matrix])
            own = _product_by_tiles(x, values[matrix], False) * scales[matrix]
            return jnp.where(is_own[:, None], own.astype(x.dtype), outputs)

        nothing = jnp.zeros((x.shape[0], math.prod(out)), x.dtype)
        return lax.fori_loop(0, matrices, one, nothing).reshape(-1, *out)

    def rows(
        self,
        index: Int32[Array, " tokens"],
        adapter: Int32[Array, " tokens"] | None,
        dtype: jax.typing.DTypeLike,
    ) -> Float[Array, "tokens in"]:
        """See `Representation`."""
        wide = self.values[...][index].astype(jnp.float32) * self.scales[...][index][:, None]
        return wide.astype(dtype)


def _product_by_tiles(
    x: Float[Array, "tokens in"], values: Int8[Array, "rows columns"], transposed: bool
) -> Float32[Array, "tokens out"]:
    """Return the product of `x` and values [in, out], or [out, in] if `transposed`."""
    axis = 0 if transposed else 1
    width, tile = values.shape[axis], max(1, _TILE_ELEMENTS // x.shape[1])

    def times(part: Int8[Array, "rows columns"]) -> Float32[Array, "tokens tile"]:
        return matmul(x, part.astype(x.dtype), transposed=transposed, out_dtype=jnp.float32)

    # Where XLA partitions the product, each shard widens its own part; a slice would gather it.
    if width <= tile or dispatch.is_partitioned():
        return times(values)

    def one(
        number: Int32[Array, ""], out: Float32[Array, "tokens out"]
    ) -> Float32[Array, "tokens out"]:
        start: Any = jnp.minimum(number * tile, width - tile)
        part = lax.dynamic_slice_in_dim(values, start, tile, axis)
        return lax.dynamic_update_slice_in_dim(out, times(part), start, 1)

    nothing = jnp.zeros((x.shape[0], width), jnp.float32)
    return lax.fori_loop(0, -(-width // tile), one, nothing)
