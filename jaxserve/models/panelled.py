"""Weights that are laid out for the CPU, in float32 or, in half of the memory, in bfloat16."""

from __future__ import annotations

import math
from functools import partial
from typing import final

import jax
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.models.linear import WeightAxes
from pallas_kernels import columns_of, from_panels, panel_matmul, to_panels


@final
class PanelledWeight(nnx.Module):
    """A weight of one matrix, in the panels that the kernel for CPUs reads.

    panels    float32 or bfloat16 [panels, in, 48]

    Axes that a product sums over are one, and so are those of its result. Products are computed in
    float32 either way.
    """

    def __init__(self, panels: Float[Array, "panels depth width"], out: tuple[int, ...]):
        # A model in half precision may have a few weights in float32, such as T5's.
        self.panels = nnx.Param(panels, logical_axes=(None, None, None), has_own_dtype=True)
        self.out = out

    @classmethod
    def of(cls, dense: nnx.Param, axes: WeightAxes, dtype: str = "float32") -> PanelledWeight:
        """Return a copy of a dense weight in panels of a dtype, on its device."""
        array = dense[...]
        return cls(_in_panels(array, axes, dtype), axes.split(array.shape)[2])

    @staticmethod
    def serves(dense: nnx.Param, axes: WeightAxes) -> bool:
        """Return whether the weight is one matrix in float32."""
        return axes.num_stacked == 0 and dense[...].dtype.name == "float32"

    def matrix(self) -> Float[Array, "in out"]:
        """Return the weight as one dense matrix; for tests."""
        return from_panels(self.panels[...], math.prod(self.out))

    def product(
        self,
        x: Float[Array, "tokens *in"],
        adapter: Int32[Array, " tokens"] | None,
        *,
        transposed: bool,
        out_dtype: jax.typing.DTypeLike,
    ) -> Float[Array, " tokens *out"]:
        """See `Representation`."""
        x = x.reshape(x.shape[0], -1)
        out = panel_matmul(x, self.panels[...], columns=math.prod(self.out))
        return out.reshape(-1, *self.out).astype(out_dtype)

    def grouped_product(
        self,
        x: Float[Array, "tokens in"],
        sizes: Int32[Array, " matrices"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, " tokens *out"]:
        """Raise NotImplementedError: `serves` refuses weights of several matrices."""
        raise NotImplementedError("a weight in panels is one matrix; keep experts' weights dense")

    def rows(
        self,
        index: Int32[Array, " tokens"],
        adapter: Int32[Array, " tokens"] | None,
        dtype: jax.typing.DTypeLike,
    ) -> Float[Array, "tokens in"]:
        """See `Representation`."""
        return columns_of(self.panels[...], index).astype(dtype)


@partial(jax.jit, static_argnums=(1, 2))
def _in_panels(
    array: Float32[Array, " *axes"], axes: WeightAxes, dtype: str
) -> Float[Array, "panels depth width"]:
    _, summed, out = axes.split(range(array.ndim))
    width = math.prod(axes.split(array.shape)[1])
    return to_panels(array.transpose(*summed, *out).reshape(width, -1), dtype)
