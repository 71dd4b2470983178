"""Products with weights: every one goes through a `Linear`, and the kernels that compute them.

A layer owns its weights, and makes a `Linear` of one where it multiplies. What it owns is an
`nnx.Param`, which is a dense weight, or a module in its place that represents the weight otherwise:
`quantised.QuantisedWeight` or `adapters.AdaptedWeight`. `replace_weights` puts such modules there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar, final

import jax
from flax import nnx
from jaxtyping import Array, Float, Int32

from pallas_kernels import grouped_matmul, matmul

# Implementations of `pallas_kernels` with that promise; the second runs on any platform, for tests.
RowKernels = Literal["triton", "triton_interpreted"]


class SumsRows(nnx.Module):
    """A part of a model whose products or norms can be computed by row kernels.

    Attributes:
      row_kernels: the kernels; None for the platform's choice.
    """

    row_kernels: RowKernels | None = None

    def use_row_kernels(self, kernels: RowKernels) -> None:
        """Compute the products and norms of this part by these kernels."""
        self.row_kernels = kernels


def use_row_kernels(model: nnx.Module, kernels: RowKernels) -> None:
    """Compute all products and norms of a model by these kernels, for batch invariance on GPUs.

    They give a row the same bits in any batch (docs/batch_invariance.md).
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, SumsRows):
            module.use_row_kernels(kernels)


def without_row_kernels(model: nnx.Module) -> list[str]:
    """Return the names of the classes of a model's parts that row kernels do not serve.

    These are parts with parameters of their own that are not `SumsRows`.
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
    """Which axes of a weight a product sums over; static, in the metadata of the parameter.

    A weight is [*stacked, *in, *out], or [*stacked, *out, *in] where it is transposed.

    Attributes:
      num_stacked: leading axes that choose a matrix: layers, experts.
      num_in: axes that the product sums over.
    """

    num_stacked: int = 0
    num_in: int = 1
    transposed: bool = False

    def split(
        self, items: Sequence[_Item]
    ) -> tuple[tuple[_Item, ...], tuple[_Item, ...], tuple[_Item, ...]]:
        """Return the stacked, the in and the out ones of `items`, one for each axis."""
        stacked, rest = tuple(items[: self.num_stacked]), tuple(items[self.num_stacked :])
        if self.transposed:
            border = len(rest) - self.num_in
            return stacked, rest[border:], rest[:border]
        return stacked, rest[: self.num_in], rest[self.num_in :]


class Representation(Protocol):
    """A representation of a weight of one layer: dense, quantised, or with adapters.

    `adapter` is the adapter of each token, -1 for none; None where no token has one.
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
    """A weight in the dtype of the activations.

    Attributes:
      row_kernels: see `Linear`.
    """

    array: Float[Array, ...]
    row_kernels: RowKernels | None = None

    def product(
        self,
        x: Float[Array, "tokens *in"],
        adapter: Int32[Array, " tokens"] | None,
        *,
        transposed: bool,
        out_dtype: jax.typing.DTypeLike,
    ) -> Float[Array, " tokens *out"]:
        """See `Representation`. On the CPU by the kernel of `pallas_kernels.matmul`.

        Raises:
          NotImplementedError: the row kernels do not serve it.
        """
        weight = self.array
        if x.ndim > 2:
            weight = weight.reshape(-1, *weight.shape[x.ndim - 1 :])
            x = x.reshape(x.shape[0], -1)
        return matmul(
            x,
            weight,
            transposed=transposed,
            out_dtype=out_dtype,
            implementation=self.row_kernels,
        )

    def grouped_product(
        self,
        x: Float[Array, "tokens in"],
        sizes: Int32[Array, " matrices"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, " tokens *out"]:
        """See `Representation`. On the CPU by the kernel of `pallas_kernels.grouped_matmul`."""
        matrices, width, *out = self.array.shape
        flat = grouped_matmul(x, self.array.reshape(matrices, width, -1), sizes)
        return flat.reshape(-1, *out)

    def rows(
        self,
        index: Int32[Array, " tokens"],
        adapter: Int32[Array, " tokens"] | None,
        dtype: jax.typing.DTypeLike,
    ) -> Float[Array, "tokens in"]:
        return self.array[index].astype(dtype)


def representation_of(owned: nnx.Variable | Representation) -> Representation:
    """Return what a layer owns as a representation: a parameter is a dense one."""
    return DenseWeight(owned[...]) if isinstance(owned, nnx.Variable) else owned


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Linear:
    """A product with a weight of one layer, plus a bias.

    Attributes:
      weight: [*in, *out], [out, in] if `transposed`, or [matrices, in, *out] to multiply by groups.
      bias: [*out].
      row_kernels: of the product with a dense weight; None for the platform's choice.
    """

    weight: Any  # nnx.Param or Representation
    bias: nnx.Param | None = None
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
        weight = representation_of(self.weight)
        if self.row_kernels is not None:
            if not isinstance(weight, DenseWeight):
                raise NotImplementedError(f"row kernels of a {type(weight).__name__}")
            weight = replace(weight, row_kernels=self.row_kernels)
        out = weight.product(x, adapter, transposed=self.transposed, out_dtype=out_dtype)
        return out if self.bias is None else out + self.bias[...].astype(out_dtype)

    def grouped(
        self,
        x: Float[Array, "tokens in"],
        sizes: Int32[Array, " matrices"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, " tokens *out"]:
        """Return each token times the matrix of its group; see `Representation.grouped_product`."""
        return representation_of(self.weight).grouped_product(x, sizes, adapter)

    def rows(
        self,
        index: Int32[Array, " tokens"],
        adapter: Int32[Array, " tokens"] | None,
        dtype: jax.typing.DTypeLike,
    ) -> Float[Array, "tokens in"]:
        """Return rows of the transposed weight; see `Representation.rows`."""
        return representation_of(self.weight).rows(index, adapter, dtype)


def replace_weights(
    model: nnx.Module, change: Callable[[nnx.Param, WeightAxes], nnx.Module]
) -> None:
    """Put `change(weight, axes)` in the place of every dense weight of a model.

    Works on the model itself, and also under `nnx.eval_shape`. Dense weights inside other
    representations are replaced too: the base of an adapted weight becomes a quantised one.
    """
    replace_weights_at(model, lambda _, weight, axes: change(weight, axes))


def replace_weights_at(
    model: nnx.Module, change: Callable[[tuple[Any, ...], nnx.Param, WeightAxes], Any]
) -> None:
    """Put `change(path, weight, axes)` in the place of every dense weight; see `replace_weights`.

    Args:
      change: may also return the weight itself. `path` is that in `nnx.to_flat_state`.
    """
    for path, module in list(nnx.iter_modules(model)):
        for name, value in list(vars(module).items()):
            if not isinstance(value, nnx.Param):
                continue
            axes = value.get_metadata().get("weight_axes")
            if axes is not None:
                setattr(module, name, change((*path, name), value, axes))
