"""The reference of gated cells, row by row; it cannot be traced."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.kernels.gated_cell.operands import KINDS, Kind, Product, RowsAt


def gated_cell(
    kind: Kind, products: Sequence[Product], carried: Sequence[RowsAt]
) -> tuple[Float[Array, "batch hidden"], ...]:
    """Implement `api.gated_cell` with products in float64."""
    batch, _ = products[0].rows[0].shape
    dtype = products[0].weight.dtype
    gates = []
    for product, num in zip(products, KINDS[kind].num_gates, strict=True):
        inputs = [_rows(one) for one in product.rows]
        added = None if product.added is None else _rows(product.added)
        weight, bias = (np.asarray(x, np.float64) for x in (product.weight, product.bias))
        found = []
        for row in range(batch):
            sums = np.concatenate([each[row] for each in inputs]) @ weight + bias
            found.append(sums if added is None else sums + added[row])
        gates += np.split(np.stack(found), num, axis=1)
    held = [jnp.asarray(_rows(one), jnp.float32) for one in carried]
    states = KINDS[kind].finish([jnp.asarray(gate, jnp.float32) for gate in gates], held)
    return tuple(each.astype(dtype) for each in states)


def _rows(rows: RowsAt) -> np.ndarray:
    values = np.asarray(rows.values, np.float64)
    return values if rows.index is None else values[np.asarray(rows.index)]
