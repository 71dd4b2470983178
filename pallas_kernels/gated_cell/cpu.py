"""Gated cells on the CPU: a C++ kernel (cpu.cc) that XLA calls on its own threads.

XLA makes a dozen operations of a small cell, each of which costs more than its work.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels import build, dispatch
from pallas_kernels.gated_cell import xla
from pallas_kernels.gated_cell.kinds import KINDS, Kind
from pallas_kernels.gated_cell.operands import Product, RowsAt

SOURCE = Path(__file__).with_name("cpu.cc")
# The number of each kind in cpu.cc.
NUMBERS = {"lstm": 0, "tree_leaf": 1, "tree_internal": 2}
# Numbers of the largest weight, which shall fit L2. `matmul` reads larger ones in longer runs.
MAX_WEIGHT = 1 << 18


def gated_cell(
    kind: Kind, products: Sequence[Product], carried: Sequence[RowsAt]
) -> tuple[Float[Array, "batch hidden"], ...]:
    """See `api.gated_cell`. The bits of a row do not depend on the other rows."""
    platform = dispatch.target_platform()
    if platform != "cpu":
        raise NotImplementedError(f"it is compiled for the CPU, not for {platform}")
    if dispatch.is_partitioned():
        raise NotImplementedError("XLA cannot partition it over a mesh")
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
        *(*_operand(first), *_operand(second), product.weight, product.bias),
        *(*_operand(product.added), *_operand(one), *_operand(other)),
        kind=np.int32(NUMBERS[kind]),
    )
    return h, c


@_cell.defjvp
def _derivative(kind: Kind, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """That of the same cell in XLA."""
    return _cell(kind, *primals), jax.jvp(partial(xla.gated_cell, kind), primals, tangents)[1]


def _operand(rows: RowsAt | None) -> tuple[jax.Array | np.ndarray, jax.Array | np.ndarray]:
    """Return the array and the numbers of rows; an array without rows for None."""
    if rows is None:
        return np.zeros((0, 0), np.float32), np.zeros(0, np.int32)
    index = np.arange(rows.shape[0], dtype=np.int32) if rows.index is None else rows.index
    return rows.values, index
