"""Creates parameters: their values, their logical axes, and their use in products."""

from __future__ import annotations

import math
from typing import Any, final

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.linear import WeightAxes

Axes = tuple[str | None, ...]
Shape = tuple[int, ...]


@final
class ParamMaker:
    """Makes parameters with their logical axes as metadata, for `sharding.state_shardings`.

    Args:
      layers: number of layers that are stacked along a first axis; None for a single layer.
    """

    def __init__(
        self,
        rngs: nnx.Rngs | None,  # for random weights; None makes zeros instead
        dtype: jax.typing.DTypeLike,
        layers: int | None = None,
        *,
        has_own_dtype: bool = False,  # the dtype is not that of the model's configuration
    ):
        self._rngs = rngs
        self._dtype = dtype
        self._layers = layers
        self._metadata: dict[str, Any] = {"has_own_dtype": True} if has_own_dtype else {}

    def with_dtype(self, dtype: jax.typing.DTypeLike | None) -> ParamMaker:
        """Return a maker of the same parameters in another dtype; itself if it is None."""
        if dtype is None:
            return self
        return ParamMaker(self._rngs, dtype, self._layers, has_own_dtype=True)

    def ones(self, axes: Axes, shape: Shape) -> nnx.Param:
        axes, shape = self._stacked(axes, shape)
        return nnx.Param(jnp.ones(shape, self._dtype), logical_axes=axes, **self._metadata)

    def zeros(self, axes: Axes, shape: Shape) -> nnx.Param:
        axes, shape = self._stacked(axes, shape)
        return nnx.Param(jnp.zeros(shape, self._dtype), logical_axes=axes, **self._metadata)

    def table(self, axes: Axes, shape: Shape) -> nnx.Param:
        """Return rows that are looked up and never multiplied, normal with 1 / sqrt(width)."""
        return self._normal(axes, shape, fan_in=shape[-1])

    def weight(
        self,
        axes: Axes,
        shape: Shape,
        *,
        num_in: int = 1,
        num_stacked: int = 0,
        transposed: bool = False,
        stays_dense: bool = False,  # whether the weight is never quantised
    ) -> nnx.Param:
        """Return a dense weight for a `Linear`, normal with 1 / sqrt(fan-in).

        Its metadata `weight_axes` is the given `WeightAxes`, plus layers that this maker stacks.
        """
        fan_in = math.prod(
            WeightAxes(num_in=num_in, num_stacked=num_stacked, transposed=transposed).split(shape)[
                1
            ]
        )
        weight_axes = WeightAxes(
            num_stacked=num_stacked + (self._layers is not None),
            num_in=num_in,
            transposed=transposed,
        )
        more = dict(stays_dense=True) if stays_dense else {}
        return self._normal(axes, shape, fan_in, weight_axes=weight_axes, **more)

    def _normal(self, axes: Axes, shape: Shape, fan_in: int, **metadata: Any) -> nnx.Param:
        axes, shape = self._stacked(axes, shape)
        if self._rngs is None:
            value = jnp.zeros(shape, self._dtype)
        else:
            value = jax.random.normal(self._rngs.params(), shape, self._dtype)
            value = value * jnp.asarray(fan_in**-0.5, self._dtype)
        return nnx.Param(value, logical_axes=axes, **metadata, **self._metadata)

    def _stacked(self, axes: Axes, shape: Shape) -> tuple[Axes, Shape]:
        if self._layers is None:
            return axes, shape
        return ("layers", *axes), (self._layers, *shape)
