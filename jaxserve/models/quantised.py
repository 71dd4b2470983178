"""Weights in eight or four bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.kernels import PackedMatrix, dequantise, dispatch, quantised_matmul
from jaxserve.kernels.gpu import power_of_two
from jaxserve.kernels.quantised_matmul import Rounding, dequantised_rows, quantise, quantise_float8
from jaxserve.models.linear import WeightAxes
from jaxserve.sharding import DEFAULT_RULES, fitted_spec
from jaxserve.sharding.shards import num_tensor_shards, over_tensor, sum_over_tensor


@final
@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """The storage of a weight's numbers, and the computation of products with them."""

    bits: int  # 8 or 4
    # With 4 bits, the numbers of a column that share a float16 scale. With 8 bits a column has one
    # float32 scale, and `group` is that of rounded activations.
    group: int
    has_minima: bool = False  # whether each group has a minimum too; symmetric otherwise
    # Whether a product rounds activations to int8, with a scale for each group of a token, as the
    # kernel for CPUs does, or for each token. None: they keep their dtype.
    rounds_activations: Rounding | None = None
    is_float: bool = False  # whether numbers are float8_e4m3fn; then activations are not rounded


INT8 = WeightFormat(bits=8, group=32)
INT4 = WeightFormat(bits=4, group=32, has_minima=True)
FP8 = WeightFormat(bits=8, group=32, is_float=True)
# Maximum tokens that one product with an expert has.
_MAX_TILE = 256


@final
class QuantisedWeight(nnx.Module):
    """A weight in few bits, in the panels that products read; see `PackedMatrix`.

    codes      uint8 [*stacked, *out[:-1], panels, groups, steps, 16, 4]
    channels   float32 [*stacked, *out[:-1], panels, 16]
    scales     float16 or float32 [*stacked, *out[:-1], panels, groups, 16]; absent for ones
    minima     as scales; absent for zeros
    zeros      as scales: uint8 or int16 zero points, instead of minima; mostly absent
    order      int32 [*stacked, in]: the input of each row of the matrix, if a checkpoint's groups
               are not of consecutive inputs; otherwise absent

    Axes that a product sums over are one, cut into groups; the last axis of `out` is cut into
    panels. No copy of the whole weight in a wider dtype is made.
    """

    def __init__(
        self,
        matrix: PackedMatrix,
        names: tuple[tuple[str | None, ...], ...],  # of the stacked, the in and the out axes
        *,
        width: int,
        out: int,
        rounds_activations: Rounding | None,
        order: Int32[np.ndarray, "*stacked in"] | None = None,
    ):
        stacked, summed, outer = names
        is_split = any(name is not None and DEFAULT_RULES[name] for name in summed)
        panels = None if outer[-1] is None or DEFAULT_RULES[outer[-1]] is None else "panels"
        lead, groups = (*stacked, *outer[:-1], panels), "groups" if is_split else None

        def param(value: Array, axes: tuple[str | None, ...]) -> nnx.Param:
            return nnx.Param(value, logical_axes=axes, has_own_dtype=True)

        self.codes = param(matrix.codes, (*lead, groups, None, None, None))
        self.channels = param(matrix.channels, (*lead, None))
        if matrix.scales is not None:
            self.scales = param(matrix.scales, (*lead, groups, None))
        if matrix.minima is not None:
            self.minima = param(matrix.minima, (*lead, groups, None))
        if matrix.zeros is not None:
            self.zeros = param(matrix.zeros, (*lead, groups, None))
        if order is not None:
            self.order = param(jnp.asarray(order), (*stacked, None))
        self.bits = matrix.bits
        self.is_float = matrix.is_float
        self.width = width
        self.out = out
        self.rounds_activations: Rounding | None = rounds_activations

    @classmethod
    def of(cls, dense: nnx.Param, axes: WeightAxes, format: WeightFormat = INT8) -> QuantisedWeight:
        """Return a dense weight rounded to a format, on its device."""
        array, names = dense[...], dense.get_metadata()["logical_axes"]
        _, summed, out = axes.split(array.shape)
        return cls(
            _quantised(array, axes, format),
            axes.split(names),
            width=math.prod(summed),
            out=out[-1],
            rounds_activations=format.rounds_activations,
        )

    @property
    def matrix(self) -> PackedMatrix:
        def held(name: str) -> Array | None:
            found = getattr(self, name, None)
            return None if found is None else found[...]

        return PackedMatrix(
            self.codes[...],
            self.channels[...],
            held("scales"),
            held("minima"),
            self.bits,
            held("zeros"),
            self.is_float,
        )

    def dequantised(self) -> Float32[Array, " *stacked_and_out in"]:
        """Return the whole weight in float32, with its in axes as one and last; for tests."""
        order = getattr(self, "order", None)
        return _dequantised(
            self.matrix, None if order is None else order[...], self.out, self.width
        )

    def product(
        self,
        x: Float[Array, "tokens *in"],
        adapter: Int32[Array, " tokens"] | None,
        *,
        transposed: bool,
        out_dtype: jax.typing.DTypeLike,
    ) -> Float[Array, " tokens *out"]:
        x = x.reshape(x.shape[0], -1)
        order = getattr(self, "order", None)
        if order is not None:
            x = x[:, order[...]]
        return self._times(x, self.matrix, out_dtype)

    def grouped_product(
        self,
        x: Float[Array, "tokens in"],
        sizes: Int32[Array, " matrices"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, " tokens *out"]:
        """Multiply tiles of tokens one after the other, each with the matrix of its group.

        Tiles have room for about twice the tokens of an average group. Their number is that of the
        worst sizes; tiles past the last one keep the outputs as they are.
        """
        tokens, matrices = x.shape[0], len(sizes)
        tile = min(_MAX_TILE, power_of_two(2 * -(-tokens // matrices)))
        num_tiles = (tokens + min(tokens, matrices) * (tile - 1)) // tile
        whole, order = self.matrix, getattr(self, "order", None)
        tiles, ends = -(-sizes // tile), jnp.cumsum(sizes)
        last_tiles = jnp.cumsum(tiles)
        x = jnp.pad(x, ((0, tile), (0, 0)))

        def one(
            number: Int32[Array, ""], outputs: Float[Array, " padded *out"]
        ) -> Float[Array, " padded *out"]:
            own = jnp.minimum(jnp.sum(last_tiles <= number), matrices - 1)
            begin = ends[own] - sizes[own] + (number - last_tiles[own] + tiles[own]) * tile
            begin = jnp.minimum(begin, tokens)  # of a tile past the last one
            rows = lax.dynamic_slice_in_dim(x, begin, tile)
            ordered = rows if order is None else rows[:, order[...][own]]
            new = self._times(ordered, jax.tree.map(lambda leaf: leaf[own], whole), x.dtype)
            is_own = (begin + jnp.arange(tile) < ends[own]).reshape(-1, *(1,) * (new.ndim - 1))
            old = lax.dynamic_slice_in_dim(outputs, begin, tile)
            new = jnp.where(is_own, new, old)
            return lax.dynamic_update_slice_in_dim(outputs, new, begin, axis=0)

        shape = (tokens + tile, *whole.channels.shape[1:-2], self.out)
        return lax.fori_loop(0, num_tiles, one, jnp.zeros(shape, x.dtype))[:tokens]

    def rows(
        self,
        index: Int32[Array, " tokens"],
        adapter: Int32[Array, " tokens"] | None,
        dtype: jax.typing.DTypeLike,
    ) -> Float[Array, "tokens in"]:
        return dequantised_rows(self.matrix, index)[:, : self.width].astype(dtype)

    def _times(
        self, x: Float[Array, "tokens in"], matrix: PackedMatrix, out_dtype: jax.typing.DTypeLike
    ) -> Float[Array, " tokens *out"]:
        times = partial(quantised_matmul, rounds_activations=self.rounds_activations)
        if dispatch.is_partitioned():
            out = self._times_on_mesh(times, x, matrix).astype(out_dtype)
        else:
            out = times(x, matrix, out_dtype=out_dtype)
        return out if out.shape[-1] == self.out else out[..., : self.out]

    def _times_on_mesh(
        self,
        times: Callable[..., Float[Array, " tokens *out"]],
        x: Float[Array, "tokens in"],
        matrix: PackedMatrix,
    ) -> Float32[Array, " tokens *out"]:
        """Multiply on each device with its share of the panels or groups, by its own kernel."""
        sizes = jax.sharding.get_abstract_mesh().shape

        def spec(name: str, leaf: Array | None) -> PartitionSpec | None:
            if leaf is None:
                return None
            names = getattr(self, name).get_metadata()["logical_axes"]
            return fitted_spec(sizes, leaf.shape, names[len(names) - leaf.ndim :])

        leaves = ("codes", "channels", "scales", "minima", "zeros")
        by_name: dict[str, Any] = {name: spec(name, getattr(matrix, name)) for name in leaves}
        specs = replace(matrix, **by_name)
        *columns, groups, _, _, _ = specs.codes
        num_shares = 1 if groups is None else num_tensor_shards()

        def own(x: Float[Array, "tokens in"], matrix: PackedMatrix) -> Array:
            return sum_over_tensor(times(x, matrix, out_dtype=jnp.float32), num_shares)

        x = jnp.pad(x, [(0, 0), (0, matrix.depth - x.shape[1])])
        product = over_tensor(
            own,
            in_specs=(PartitionSpec(None, groups), specs),
            out_specs=PartitionSpec(None, *columns),
        )
        return product(x, matrix)


@partial(jax.jit, static_argnums=(2, 3))
def _dequantised(
    matrix: PackedMatrix, order: Int32[Array, " *stacked in"] | None, out: int, width: int
) -> Float32[Array, " *stacked_and_out in"]:
    numbers = dequantise(matrix)[..., :out, :width]
    if order is None:
        return numbers
    places = jnp.argsort(order, axis=-1)
    places = places.reshape(*places.shape[:-1], *(1,) * (numbers.ndim - places.ndim), -1)
    return jnp.take_along_axis(numbers, places, axis=-1)


@partial(jax.jit, static_argnums=(1, 2))
def _quantised(array: Float[Array, ...], axes: WeightAxes, format: WeightFormat) -> PackedMatrix:
    if format.is_float:
        return quantise_float8(in_axes_last(array, axes), group=format.group)
    return quantise(
        in_axes_last(array, axes),
        bits=format.bits,
        group=format.group,
        has_minima=format.has_minima,
    )


def in_axes_last(array: Any, axes: WeightAxes) -> Any:
    """Return a weight as [*stacked, *out, in], a JAX or NumPy array."""
    stacked, summed, out = axes.split(range(array.ndim))
    turned = array.transpose(*stacked, *out, *summed)
    width = int(np.prod([array.shape[axis] for axis in summed]))
    return turned.reshape(*(array.shape[axis] for axis in (*stacked, *out)), width)
