"""Products with weights, all of them through a `Linear`, and the kernels that compute them.

A layer owns its weights, and makes a `Linear` of one to multiply. It owns an `nnx.Param`, which is
a dense weight, or a module with another representation: `quantised.QuantisedWeight` or
`adapters.AdaptedWeight`. `replace_weights` puts such modules there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar, final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxserve.kernels import grouped_matmul, matmul

# Implementations of `jaxserve.kernels` that give a row the same bits in any batch; the second runs
# on any platform, for tests.
RowKernels = Literal["triton", "triton_interpreted"]
# Row kernels -> the implementations of products that are by default other kernels.
FIXED_TILES: Mapping[RowKernels | None, Literal["triton_rows", "triton_rows_interpreted"]] = (
    MappingProxyType({"triton": "triton_rows", "triton_interpreted": "triton_rows_interpreted"})
)


class SumsRows(nnx.Module):
    """A part of a model whose products or norms can be computed by row kernels."""

    row_kernels: RowKernels | None = None  # the kernels; None for the platform's choice

    def use_row_kernels(self, kernels: RowKernels) -> None:
        self.row_kernels = kernels


def use_row_kernels(model: nnx.Module, kernels: RowKernels) -> None:
    """Compute all products and norms of a model by these kernels, for batch invariance on GPUs.

    They give a row the same bits in any batch (docs/batch_invariance.md).
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, SumsRows):
            module.use_row_kernels(kernels)


def without_row_kernels(model: nnx.Module) -> list[str]:
    """Return the class names of parts with own parameters that are not `SumsRows`.

    Row kernels do not serve these parts of a model.
    """
    return sorted(
        {
            type(module).__name__
            for _, module in nnx.iter_modules(model)
            if not isinstance(module, SumsRows)
            and any(isinstance(value, nnx.Variable) for value in vars(module).values())
        }
    )


_Item = TypeVar("_Item")


@final
@dataclass(frozen=True, kw_only=True)
class WeightAxes:
    """The axes of a weight that a product sums over; static, in the metadata of the parameter.

    A weight is [*stacked, *in, *out], or [*stacked, *out, *in] if it is transposed.
    """

    num_stacked: int = 0  # leading axes that choose a matrix: layers, experts
    num_in: int = 1  # axes that the product sums over
    transposed: bool = False

    def split(
        self, items: Sequence[_Item]
    ) -> tuple[tuple[_Item, ...], tuple[_Item, ...], tuple[_Item, ...]]:
        """Split `items`, one for each axis, into the stacked, the in and the out ones."""
        stacked, rest = tuple(items[: self.num_stacked]), tuple(items[self.num_stacked :])
        if self.transposed:
            border = len(rest) - self.num_in
            return stacked, rest[border:], rest[:border]
        return stacked, rest[: self.num_in], rest[self.num_in :]


class Representation(Protocol):
    """A representation of a weight of one layer: dense, quantised, or with adapters.

    `adapter` is the adapter of each token, -1 for none; None if no token has one.
    Representations without adapters ignore it.
    """

    def product(
        self,
        x: Float[Array, "tokens *in"],
        adapter: Int32[Array, " tokens"] | None,
        *,
        transposed: bool,
        out_dtype: jax.typing.DTypeLike,
    ) -> Float[Array, " tokens *out"]:
        """Return `x` times a weight [*in, *out], or [out, in] if `transposed`."""
        ...

    def grouped_product(
        self,
        x: Float[Array, "tokens in"],
        sizes: Int32[Array, " matrices"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, " tokens *out"]:
        """Return each token times its matrix of a weight [matrices, in, *out].

        The first `sizes[0]` tokens belong to matrix 0, the next `sizes[1]` to matrix 1, and so on.
        Tokens after the last group get zeros. The result has x's dtype.
        """
        ...

    def rows(
        self,
        index: Int32[Array, " tokens"],
        adapter: Int32[Array, " tokens"] | None,
        dtype: jax.typing.DTypeLike,
    ) -> Float[Array, "tokens in"]:
        """Return rows of a transposed weight [out, in], as an embedding does."""
        ...


@final
@dataclass(frozen=True, eq=False)
class DenseWeight:
    """A weight in the dtype of the activations."""

    array: Float[Array, ...]
    row_kernels: RowKernels | None = None  # see `Linear`

    def product(
        self,
        x: Float[Array, "tokens *in"],
        adapter: Int32[Array, " tokens"] | None,
        *,
        transposed: bool,
        out_dtype: jax.typing.DTypeLike,
    ) -> Float[Array, " tokens *out"]:
        """Compute the product by the row kernels, or on a CPU by `jaxserve.kernels.matmul`."""
        weight = self.array
        if x.ndim > 2:
            weight = weight.reshape(-1, *weight.shape[x.ndim - 1 :])
            x = x.reshape(x.shape[0], -1)
        return matmul(
            x, weight, transposed=transposed, out_dtype=out_dtype, implementation=self.row_kernels
        )

    def grouped_product(
        self,
        x: Float[Array, "tokens in"],
        sizes: Int32[Array, " matrices"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, " tokens *out"]:
        """Compute the product by `jaxserve.kernels.grouped_matmul`."""
        matrices, width, *out = self.array.shape
        weight = self.array.reshape(matrices, width, -1)
        how = FIXED_TILES.get(self.row_kernels)
        flat = grouped_matmul(x, weight, sizes, implementation=how)
        return flat.reshape(-1, *out)

    def rows(
        self,
        index: Int32[Array, " tokens"],
        adapter: Int32[Array, " tokens"] | None,
        dtype: jax.typing.DTypeLike,
    ) -> Float[Array, "tokens in"]:
        return self.array[index].astype(dtype)


def representation_of(owned: nnx.Variable | Representation) -> Representation:
    """Return a layer's weight as a representation: a parameter is a dense one."""
    return DenseWeight(owned[...]) if isinstance(owned, nnx.Variable) else owned


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Linear:
    """A product with a weight of one layer, plus a bias.

    Attributes:
      weight: [*in, *out], [out, in] if `transposed`, or [matrices, in, *out] to multiply by groups.
      row_kernels: of the product with a dense weight; None for the platform's choice.
    """

    weight: Any  # nnx.Param or Representation
    bias: nnx.Param | None = None  # [*out], or [matrices, *out]
    transposed: bool = field(default=False, metadata=dict(static=True))
    row_kernels: RowKernels | None = field(default=None, metadata=dict(static=True))

    def __call__(
        self,
        x: Float[Array, "tokens *in"],
        adapter: Int32[Array, " tokens"] | None,
        *,
        out_dtype: jax.typing.DTypeLike | None = None,
    ) -> Float[Array, " tokens *out"]:
        """Return the product in `out_dtype`, x's dtype by default; see `Representation`."""
        out_dtype = x.dtype if out_dtype is None else out_dtype
        weight = self._representation()
        out = weight.product(x, adapter, transposed=self.transposed, out_dtype=out_dtype)
        return out if self.bias is None else out + self.bias[...].astype(out_dtype)

    def grouped(
        self,
        x: Float[Array, "tokens in"],
        sizes: Int32[Array, " matrices"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, " tokens *out"]:
        """Return each token times the matrix of its group, plus the bias of that matrix.

        See `Representation.grouped_product`. Tokens after the last group have arbitrary values.
        """
        out = self._representation().grouped_product(x, sizes, adapter)
        if self.bias is None:
            return out
        matrix = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(x.shape[0]), side="right")
        return out + self.bias[...][jnp.minimum(matrix, len(sizes) - 1)].astype(out.dtype)

    def rows(
        self,
        index: Int32[Array, " tokens"],
        adapter: Int32[Array, " tokens"] | None,
        dtype: jax.typing.DTypeLike,
    ) -> Float[Array, "tokens in"]:
        return representation_of(self.weight).rows(index, adapter, dtype)

    def _representation(self) -> Representation:
        """Return the weight with its row kernels, or raise NotImplementedError."""
        weight = representation_of(self.weight)
        if self.row_kernels is None:
            return weight
        if not isinstance(weight, DenseWeight):
            raise NotImplementedError(f"row kernels of a {type(weight).__name__}")
        return replace(weight, row_kernels=self.row_kernels)


def replace_weights(
    model: nnx.Module, change: Callable[[nnx.Param, WeightAxes], nnx.Module]
) -> None:
    """Replace every dense weight of a model by `change(weight, axes)`.

    Works on the model itself, and also under `nnx.eval_shape`. Dense weights inside other
    representations are replaced too: the base of an adapted weight becomes a quantised one.
    """
    replace_weights_at(model, lambda _, weight, axes: change(weight, axes))


def replace_weights_at(
    model: nnx.Module, change: Callable[[tuple[Any, ...], nnx.Param, WeightAxes], Any]
) -> None:
    """Replace every dense weight by `change(path, weight, axes)`; see `replace_weights`.

    `change` may also return the weight itself. `path` is that in `nnx.to_flat_state`.
    """
    for path, module in list(nnx.iter_modules(model)):
        for name, value in list(vars(module).items()):
            if not isinstance(value, nnx.Param):
                continue
            axes = value.get_metadata().get("weight_axes")
            if axes is not None:
                setattr(module, name, change((*path, name), value, axes))
