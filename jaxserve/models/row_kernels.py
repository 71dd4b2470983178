"""The parts of a model that add up numbers of a row, and the kernels that fix the order of it.

Batch-invariant serving on GPUs (docs/batch_invariance.md) has every product and norm of a model
computed by kernels that give a row the same bits in any batch. The steps ask for them.
"""

from __future__ import annotations

from typing import Literal

from flax import nnx

# Implementations of `pallas_kernels` with that promise; the second runs on any platform, for tests.
RowKernels = Literal["triton", "triton_interpreted"]


class SumsRows(nnx.Module):
    """A part of a model whose products or norms can be computed by row kernels.

    Attributes:
      row_kernels: the kernels; None for the platform's choice.
    """

    row_kernels: RowKernels | None = None

    def use_row_kernels(self, kernels: RowKernels) -> None:
        """Have the products and norms of this part alone computed by these kernels."""
        self.row_kernels = kernels


def use_row_kernels(model: nnx.Module, kernels: RowKernels) -> None:
    """Have all products and norms of a model computed by kernels; see `without_row_kernels`."""
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
