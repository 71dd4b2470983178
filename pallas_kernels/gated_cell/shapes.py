"""Named shapes for the tests and the benchmarks of gated cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels.gated_cell.api import gated_cell
from jaxserve.kernels.gated_cell.operands import KINDS, Kind, Product, RowsAt


@final
@dataclass(frozen=True, kw_only=True)
class GatedShape:
    """A task of a cell whose states are in a pool of slots.

    `batch` rows of the task; `num_slots` rows of the pool, and of the table of embeddings, which
    are `width` wide for kinds that read one.
    """

    kind: Kind
    batch: int
    hidden: int
    width: int
    num_slots: int = 1000
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.kind}_{self.hidden}x{self.batch}_{self.dtype}"

    @property
    def widths(self) -> tuple[tuple[int, ...], ...]:
        """The widths of the rows of each product."""
        x, h = self.width, self.hidden
        return {
            "lstm": ((x, h),),
            "gru": ((x,), (h,)),
            "tree_leaf": ((x,),),
            "tree_internal": ((h, h),),
        }[self.kind]

    @property
    def moved_bytes(self) -> int:
        """Bytes of weights and biases, and of each row that is read or written, each once."""
        cell = KINDS[self.kind]
        weights = sum(
            (sum(widths) + 1) * num * self.hidden
            for widths, num in zip(self.widths, cell.num_gates, strict=True)
        )
        # The state of a GRU is both carried and an input of a product.
        num_carried = 0 if self.kind == "gru" else cell.num_carried
        read = sum(map(sum, self.widths)) + num_carried * self.hidden
        rows = self.batch * (read + cell.num_outputs * self.hidden)
        return (weights + rows) * jnp.dtype(self.dtype).itemsize


# Small enough for the reference and the interpreter; sizes that fill no tile, and several tiles.
TEST_SHAPES = (
    GatedShape(kind="lstm", batch=5, hidden=24, width=10, num_slots=13),
    GatedShape(kind="lstm", batch=70, hidden=16, width=40, num_slots=150),
    GatedShape(kind="gru", batch=3, hidden=20, width=33, num_slots=9),
    GatedShape(kind="tree_leaf", batch=17, hidden=40, width=7, num_slots=30),
    GatedShape(kind="tree_internal", batch=6, hidden=18, width=5, num_slots=20),
    GatedShape(kind="lstm", batch=4, hidden=32, width=64, num_slots=12, dtype="bfloat16"),
)
# The thesis's cells (2.7.1), and the GRU of `g2p-en`.
GPU_SHAPES = (
    *(GatedShape(kind="lstm", batch=batch, hidden=1024, width=1024) for batch in (1, 64, 512)),
    GatedShape(kind="gru", batch=64, hidden=256, width=256),
    GatedShape(kind="gru", batch=512, hidden=1024, width=1024),
    GatedShape(kind="tree_leaf", batch=64, hidden=1024, width=1024),
    GatedShape(kind="tree_internal", batch=64, hidden=1024, width=1024),
    GatedShape(kind="tree_internal", batch=512, hidden=1024, width=1024),
    GatedShape(kind="lstm", batch=64, hidden=1024, width=1024, dtype="bfloat16"),
)


def make_inputs(shape: GatedShape, seed: int) -> dict[str, Any]:
    """Return random operands of `gated_cell`; all states are rows of one pool."""
    random = np.random.default_rng(seed)

    def array(*size: int) -> jax.Array:
        return jnp.asarray(random.normal(size=size) * 0.3, jnp.dtype(shape.dtype))

    def slots() -> jax.Array:
        return jnp.asarray(random.permutation(shape.num_slots)[: shape.batch], jnp.int32)

    return _operands(shape, array, slots)


def _operands(
    shape: GatedShape, array: Callable[..., Any], slots: Callable[[], Any]
) -> dict[str, Any]:
    """Return the operands; `array(*size)` makes arrays, `slots()` row numbers."""
    cell = KINDS[shape.kind]
    pool, table = array(shape.num_slots, shape.hidden), array(shape.num_slots, shape.width)
    # The embedding is the first input of every kind that has one.
    read = iter([pool, pool] if shape.kind == "tree_internal" else [table, pool])
    products = []
    for widths, num in zip(shape.widths, cell.num_gates, strict=True):
        rows = tuple(RowsAt(next(read), slots()) for _ in widths)
        size = num * shape.hidden
        products.append(Product(rows, array(sum(widths), size), array(size)))
    carried = tuple(RowsAt(pool, slots()) for _ in range(cell.num_carried))
    return {"products": tuple(products), "carried": carried}


@final
@dataclass(frozen=True)
class Configuration:
    shape: GatedShape
    kernels = frozenset({"gated_cell"})
    donated = ()

    def __str__(self) -> str:
        return f"gated_cell-{self.shape}"

    def call(self) -> tuple[Any, dict[str, Any]]:
        shape = self.shape
        dtype = jnp.dtype(shape.dtype)

        def array(*size: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(size, dtype)

        def slots() -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((shape.batch,), jnp.dtype("int32"))

        return partial(gated_cell, shape.kind), _operands(shape, array, slots)


CONFIGURATIONS = tuple(Configuration(shape) for shape in GPU_SHAPES)
# Timed on a CPU.
SMALL_CONFIGURATIONS = (Configuration(GatedShape(kind="lstm", batch=16, hidden=128, width=128)),)
