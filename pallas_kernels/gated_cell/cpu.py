"""Gated cells on the CPU: a C++ kernel (cpu.cc) that XLA calls on its own threads.

XLA splits a small cell into a dozen operations, each of which costs more than its work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, UInt8

from jaxserve.kernels import build, dispatch
from jaxserve.kernels.gated_cell import xla
from jaxserve.kernels.gated_cell.operands import KINDS, GatedCell, Kind, Product, RowsAt

SOURCE = Path(__file__).with_name("cpu.cc")
# The number of each kind in cpu.cc.
NUMBERS = {"lstm": 0, "tree_leaf": 1, "tree_internal": 2}
# Most elements of a weight, so that it fits in L2. `matmul` reads larger ones in longer runs.
MAX_WEIGHT = 1 << 18


def gated_cell(
    kind: Kind, products: Sequence[Product], carried: Sequence[RowsAt]
) -> tuple[Float[Array, "batch hidden"], ...]:
    """Implement `api.gated_cell`. The bits of a row do not depend on the other rows."""
    dispatch.require_cpu()
    if kind not in NUMBERS:
        raise NotImplementedError(f"it serves {tuple(NUMBERS)}, not {kind}")
    (product,) = products
    if len(product.rows) > 2:
        raise NotImplementedError(f"it serves rows of at most two parts, not {len(product.rows)}")
    arrays = [array for array in jax.tree.leaves((product, carried)) if array.ndim == 2]
    dtypes = {str(array.dtype) for array in (*arrays, product.bias)}
    if dtypes != {"float32"}:
        raise NotImplementedError(f"it serves float32 only, not {sorted(dtypes)}")
    if product.weight.size > MAX_WEIGHT or 0 in [array.size for array in arrays]:
        raise NotImplementedError(
            f"it serves weights of 1 to {MAX_WEIGHT} numbers, and arrays that are not empty, not "
            f"a weight {product.weight.shape}"
        )
    return _cell(kind, tuple(products), tuple(carried))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _cell(
    kind: Kind, products: tuple[Product, ...], carried: tuple[RowsAt, ...]
) -> tuple[jax.Array, jax.Array]:
    (product,) = products
    first = product.rows[0]
    second = product.rows[1] if len(product.rows) > 1 else None
    one, other = [*carried, None, None][:2]
    batch = first.shape[0]
    hidden = product.bias.shape[0] // KINDS[kind].num_gates[0]
    state = jax.ShapeDtypeStruct((batch, hidden), jnp.dtype("float32"))
    call = jax.ffi.ffi_call(build.cpu_target(SOURCE, "GatedCell"), [state, state])
    h, c = call(
        *_operand(first),
        *_operand(second),
        product.weight,
        product.bias,
        *_operand(product.added),
        *_operand(one),
        *_operand(other),
        kind=np.int32(NUMBERS[kind]),
    )
    return h, c


@_cell.defjvp
def _derivative(kind: Kind, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Compute the tangent with XLA's version of the cell."""
    return _cell(kind, *primals), jax.jvp(partial(xla.gated_cell, kind), primals, tangents)[1]


def _operand(rows: RowsAt | None) -> tuple[jax.Array | np.ndarray, jax.Array | np.ndarray]:
    """Return the array and the row numbers; an array without rows for None."""
    if rows is None:
        return np.zeros((0, 0), np.float32), np.zeros(0, np.int32)
    index = np.arange(rows.shape[0], dtype=np.int32) if rows.index is None else rows.index
    return rows.values, index


# Columns that are no numbers, as in cpu.cc: the rows of the table that tokens choose, and none.
_OF_TOKEN, _NONE = -1, -2
# Columns of the widest panel of cpu.cc, to which the states of a packed weight are rounded up.
_WIDEST = 48
_KINDS = {**NUMBERS, "lookup": 3}


@final
@dataclass(frozen=True)
class Column:
    """A column of `rows` that has the row numbers; it replaces an array in `RowsAt.index`."""

    number: int


@final
@dataclass(frozen=True)
class TaskColumns:
    """The meaning of the columns of `rows` in `gated_tasks`; `outputs` are the slots of the new h
    and c.

    `word_of`: column of tokens -> column with the token itself, for rows with a negative slot.
    """

    word_of: Mapping[int, int]
    outputs: tuple[int, int]


def pack_gates(cell: GatedCell) -> Float[Array, " packed"]:
    """Return the weight of a cell in the order in which `gated_tasks` reads it, computed now.

    Raise `NotImplementedError` without a C++ compiler.
    """
    if cell.kind == "lookup" or cell.kind not in NUMBERS:
        return jnp.zeros(0, jnp.float32)
    (product,) = cell.products
    (num_gates,) = KINDS[cell.kind].num_gates
    hidden = product.weight.shape[1] // num_gates
    size = -(-hidden // _WIDEST) * _WIDEST * num_gates * product.weight.shape[0]
    call = jax.ffi.ffi_call(
        build.cpu_target(SOURCE, "PackGates"), jax.ShapeDtypeStruct((size,), jnp.float32)
    )
    return call(product.weight, kind=np.int32(NUMBERS[cell.kind]))


def gated_tasks(
    cell: GatedCell,
    columns: TaskColumns,
    states: Float[Array, "slots hidden"],
    tokens: Int32[Array, " token_slots"] | None,
    rows: Int32[Array | np.ndarray, "num width"],
    reads: Int32[Array | np.ndarray, " reads"],
    packed: Float[Array, " packed"],
    *,
    trash: int,
) -> tuple[Float[Array, "slots hidden"], UInt8[Array, " num"], Float[Array, "reads hidden"]]:
    """Run tasks one after the other, each of which reads all its rows before it writes any.

    Args:
      cell: a cell whose rows are rows of `states`, or of a table of the cell by tokens; their
        index is a `Column`.
      states: changed in place if it is donated.
      tokens: tokens that are not in `rows`.
      rows: the slots and words of each row, in `columns`, and in the last column the number of its
        task, which does not decrease, and is negative for rows after the last task.
      reads: slots that are read after all tasks; negative after the last of them.
      packed: `pack_gates(cell)`.
      trash: the slot that nothing reads; a row that writes both results there is not computed.

    Returns:
      The states; for each row 1 if its results are finite and else 0; and the states at `reads`,
      which are undefined at negative slots.

    Raises:
      NotImplementedError: it cannot serve this cell, for the given reason.
    """
    dispatch.require_cpu()
    if cell.kind not in _KINDS or len(cell.products) > 1:
        raise NotImplementedError(f"it serves {tuple(_KINDS)}, not {cell.kind}")
    product = cell.products[0] if cell.products else None
    tables: list[jax.Array] = []
    token_columns: set[int] = set()

    def column_of(part: RowsAt | None) -> int:
        if part is None:
            return _NONE
        if not isinstance(part.index, Column):
            raise NotImplementedError("it serves rows that a column chooses")
        if part.values is states:
            return part.index.number
        token_columns.add(part.index.number)
        tables.append(part.values)
        return _OF_TOKEN

    parts = () if product is None else product.rows
    if len(parts) > 2:
        raise NotImplementedError(f"it serves rows of at most two parts, not {len(parts)}")
    first, second = ([*map(column_of, parts), _NONE, _NONE])[:2]
    one, other = ([*map(column_of, cell.carried), _NONE, _NONE])[:2]
    no_rows = np.zeros((0, 0), np.float32)
    weight, bias, added = no_rows, np.zeros(0, np.float32), no_rows
    if product is None:
        if (one, other) != (_OF_TOKEN, _OF_TOKEN):
            raise NotImplementedError("it looks up both states of a token")
        one = other = _NONE
        added = tables.pop()
    else:
        if len(tables) > 1 or _OF_TOKEN in (one, other):
            raise NotImplementedError("it serves carried states, and one part of a token")
        weight, bias = product.weight, product.bias
        if product.added is not None:
            column_of(product.added)
            added = tables.pop()
    table = tables[0] if tables else no_rows
    dtypes = {str(array.dtype) for array in (states, weight, bias, table, added)}
    if dtypes != {"float32"} or weight.size > MAX_WEIGHT:
        raise NotImplementedError(
            f"it serves float32 and weights of at most {MAX_WEIGHT} numbers, not {sorted(dtypes)} "
            f"and {weight.shape}"
        )
    if len(token_columns) > 1 or not token_columns <= set(columns.word_of):
        raise NotImplementedError("it serves one input of tokens, which travel with the task")
    token = token_columns.pop() if token_columns else _NONE
    call = jax.ffi.ffi_call(
        build.cpu_target(SOURCE, "GatedTasks"),
        [
            jax.ShapeDtypeStruct(states.shape, states.dtype),
            jax.ShapeDtypeStruct(rows.shape[:1], np.dtype(np.uint8)),
            jax.ShapeDtypeStruct((*reads.shape, states.shape[1]), states.dtype),
        ],
        input_output_aliases={0: 0},
    )
    numbers = [first, second, one, other, token, columns.word_of.get(token, _NONE)]
    new_states, is_finite, values = call(
        states,
        np.zeros(0, np.int32) if tokens is None else tokens,
        rows,
        reads,
        packed,
        bias,
        table,
        added,
        kind=np.int32(_KINDS[cell.kind]),
        trash=np.int32(trash),
        columns=np.array([*numbers, *columns.outputs], np.int32),
    )
    return new_states, is_finite, values
