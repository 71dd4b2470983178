"""The calls of the GPU kernels that are lowered and compiled before a release."""

from __future__ import annotations

from typing import Any, Protocol

from jaxserve.kernels.fused_matmul.row_shapes import CONFIGURATIONS as _ROWWISE
from jaxserve.kernels.fused_matmul.shapes import CONFIGURATIONS as _FUSED
from jaxserve.kernels.gated_cell.shapes import CONFIGURATIONS as _GATED_CELLS
from jaxserve.kernels.grouped_matmul.shapes import CONFIGURATIONS as _GROUPED
from jaxserve.kernels.grouped_matmul.shapes import (
    INVARIANT_CONFIGURATIONS as _INVARIANT_GROUPED,
)
from jaxserve.kernels.kv_write.shapes import CONFIGURATIONS as _WRITES
from jaxserve.kernels.page_copy.shapes import CONFIGURATIONS as _COPIES
from jaxserve.kernels.paged_attention.configurations import CONFIGURATIONS as _ATTENTION
from jaxserve.kernels.paged_attention.configurations import (
    INVARIANT_CONFIGURATIONS as _INVARIANT_ATTENTION,
)
from jaxserve.kernels.pointwise.shapes import CONFIGURATIONS as _NORMS
from jaxserve.kernels.quantised_matmul.shapes import CONFIGURATIONS as _PRODUCTS


class Configuration(Protocol):
    """A kind of kernel call; its `str` is its name."""

    @property
    def kernels(self) -> frozenset[str]:
        """Return the names of the kernels that serve the call."""
        ...

    @property
    def donated(self) -> tuple[str, ...]:
        """Return the names of the arguments that must be written in place."""
        ...

    def call(self) -> tuple[Any, dict[str, Any]]:
        """Return a function for `jax.jit` and its abstract arguments."""
        ...


CONFIGURATIONS: tuple[Configuration, ...] = (
    *_ATTENTION,
    *_INVARIANT_ATTENTION,
    *_WRITES,
    *_COPIES,
    *_PRODUCTS,
    *_FUSED,
    *_ROWWISE,
    *_GROUPED,
    *_INVARIANT_GROUPED,
    *_NORMS,
    *_GATED_CELLS,
)
