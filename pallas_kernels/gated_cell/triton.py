"""Gated cells on NVIDIA GPUs from sm_80 on: gather, products and gates in one Pallas kernel.

Triton compiles it. A program computes a tile of [rows, columns] of the new states: it adds up the
products of all gates for these columns, reads each input row in place, and applies the gates
to the sums in registers. So neither the gathered inputs nor the gates are written to memory.

Roofline: a call moves the weights and biases once, each input row once and each new state once
(`GatedShape.moved_bytes`), and it needs at least these bytes over the memory bandwidth. An LSTM of
1024 in float32 has 33.6 MB of weights, and its states are 20 KB for each row, so the weights are
96 % of the bytes at 64 rows: 11 us at 3.3 TB/s. Tiles of other rows read the weights again, from
the L2 cache. From 512 rows on, arithmetic limits it: 8.6 GFLOP.

The new states are not scattered here: a task may write a new state to a slot from which another
row still reads, programs run in any order, and Triton has no barrier between them. `scatter_pages`
writes all new states of a pool to their slots in one further call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from jaxserve.kernels import gpu
from jaxserve.kernels.gated_cell.operands import KINDS, CellKind, Kind, Product, RowsAt

_DTYPES = ("float32", "bfloat16", "float16")
# A product of tensor cores has at least 16 rows and columns.
_LEAST = 16
_MOST_ROWS, _MOST_COLUMNS = 64, 32
# Programs that keep the memory of a large GPU busy; with fewer, tiles have fewer columns.
_PROGRAMS = 128
_INNER_BYTES = 128  # of each row that is loaded at once: a cache line


def gated_cell(
    kind: Kind, products: Sequence[Product], carried: Sequence[RowsAt], *, interpret: bool = False
) -> tuple[Float[Array, "batch hidden"], ...]:
    """Implement `api.gated_cell`; `interpret` runs on any platform, for tests.

    Sums are in float32. The products of float32 have JAX's matmul precision: TF32 by default. The
    bits of a row depend on the batch size alone, not on the other rows.
    """
    if not interpret:
        gpu.require_triton()
    if any(product.added is not None for product in products):
        raise NotImplementedError("it adds no rows to a product")
    arrays = [array for array in jax.tree.leaves((products, carried)) if array.ndim == 2]
    dtypes = {array.dtype.name for array in arrays}
    if len(dtypes) != 1 or not dtypes <= set(_DTYPES):
        raise NotImplementedError(f"it serves one of {_DTYPES}, not {sorted(dtypes)}")
    gpu.require_addressable(*arrays)
    batch, _ = products[0].rows[0].shape
    cell = KINDS[kind]
    hidden = products[0].bias.shape[0] // cell.num_gates[0]
    tile = tile_of(batch, hidden, arrays[0].dtype.itemsize)
    states = pl.pallas_call(
        partial(_cell_kernel, cell, tile, batch, hidden),
        grid=(-(-batch // tile.rows), -(-hidden // tile.columns)),
        out_shape=jax.ShapeDtypeStruct((cell.num_outputs * batch, hidden), arrays[0].dtype),
        compiler_params=triton.CompilerParams(
            num_warps=4 if sum(cell.num_gates) <= 4 else 8,
            # A row of a tile has `_INNER_BYTES`, and so has a column of each gate's weight.
            num_stages=gpu.num_stages(
                4, _INNER_BYTES * (tile.rows + max(cell.num_gates) * tile.columns)
            ),
        ),
        interpret=interpret,
        name="gated_cell",
    )(tuple(products), tuple(carried))
    # One array, so that a scatter of all states needs no copy that concatenates them.
    return tuple(states[batch * i : batch * (i + 1)] for i in range(cell.num_outputs))


@final
@dataclass(frozen=True)
class Tile:
    """The static sizes of a program: rows and columns of the new states, and inner elements."""

    rows: int
    columns: int
    inner: int


def tile_of(batch: int, hidden: int, itemsize: int) -> Tile:
    rows = min(max(gpu.power_of_two(batch), _LEAST), _MOST_ROWS)
    columns = _MOST_COLUMNS
    while columns > _LEAST and -(-batch // rows) * (hidden // columns) < _PROGRAMS:
        columns //= 2
    return Tile(rows, columns, _INNER_BYTES // itemsize)


def _cell_kernel(
    cell: CellKind,
    tile: Tile,
    batch: int,
    hidden: int,
    products: tuple[Product, ...],  # of references
    carried: tuple[RowsAt, ...],  # of references
    out_ref: Any,  # [outputs * batch, hidden]
) -> None:
    row = pl.program_id(0) * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32)
    column = pl.program_id(1) * tile.columns + jnp.arange(tile.columns, dtype=jnp.int32)
    is_row, is_column = row < batch, column < hidden
    mask = is_row[:, None] & is_column[None, :]
    gates: list[jax.Array] = []
    for product, num in zip(products, cell.num_gates, strict=True):
        columns = [gate * hidden + column for gate in range(num)]
        gates += _gates(product, columns, row, is_row, is_column, tile)
    held = [
        triton.load(
            rows.values.at[_places(rows, row, is_row)[:, None], column[None, :]],
            mask=mask,
            other=0.0,
        )
        for rows in carried
    ]
    outputs = cell.finish(gates, [values.astype(jnp.float32) for values in held])
    for number, values in enumerate(outputs):
        at = out_ref.at[number * batch + row[:, None], column[None, :]]
        triton.store(at, values.astype(out_ref.dtype), mask=mask)


def _gates(
    product: Product,
    columns: Sequence[jax.Array],
    row: jax.Array,
    is_row: jax.Array,
    is_column: jax.Array,
    tile: Tile,
) -> list[jax.Array]:
    """Return the gates of a product [rows, columns], each for its columns of the weight."""
    sums = tuple(jnp.zeros((tile.rows, tile.columns), jnp.float32) for _ in columns)
    first = 0
    for rows in product.rows:
        width = rows.values.shape[1]
        places = _places(rows, row, is_row)
        add = partial(_add_block, product, rows, places, first, columns, is_row, is_column, tile)
        sums = lax.fori_loop(0, -(-width // tile.inner), add, sums)
        first += width
    biases = [triton.load(product.bias.at[c], mask=is_column, other=0.0) for c in columns]
    return [
        total + bias[None, :].astype(jnp.float32) for total, bias in zip(sums, biases, strict=True)
    ]


def _add_block(
    product: Product,
    rows: RowsAt,
    places: jax.Array,
    first: int,
    columns: Sequence[jax.Array],
    is_row: jax.Array,
    is_column: jax.Array,
    tile: Tile,
    block: jax.Array,
    sums: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """Add the contribution of a block of elements to the sums; `first` is its row of the weight."""
    lane = block * tile.inner + jnp.arange(tile.inner, dtype=jnp.int32)
    is_lane = lane < rows.values.shape[1]
    x = triton.load(
        rows.values.at[places[:, None], lane[None, :]],
        mask=is_row[:, None] & is_lane[None, :],
        other=0.0,
    )
    weights = [
        triton.load(
            product.weight.at[first + lane[:, None], column[None, :]],
            mask=is_lane[:, None] & is_column[None, :],
            other=0.0,
        )
        for column in columns
    ]
    return tuple(
        total + jnp.dot(x, weight, preferred_element_type=jnp.float32)
        for total, weight in zip(sums, weights, strict=True)
    )


def _places(rows: RowsAt, row: jax.Array, is_row: jax.Array) -> jax.Array:
    """Return the row numbers of `values` that a program reads."""
    return row if rows.index is None else triton.load(rows.index.at[row], mask=is_row, other=0)
