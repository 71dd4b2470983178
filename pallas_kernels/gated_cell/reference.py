"""The reference of gated cells, row by row; it cannot be traced."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.gated_cell.kinds import KINDS, Kind
from pallas_kernels.gated_cell.operands import Product, RowsAt


def gated_cell(
    kind: Kind, products: Sequence[Product], carried: Sequence[RowsAt]
) -> tuple[Float[Array, "batch hidden"], ...]:
    """See `api.gated_cell`; the products are in float64."""
    batch, _ = products[0].rows[0].shape
    dtype = products[0].weight.dtype
    rows = []
    for row in range(batch):
        gates = []
        for product, num in zip(products, KINDS[kind].num_gates, strict=True):
            x = np.concatenate([_row(one, row) for one in product.rows])
            found = x @ np.asarray(product.weight, np.float64) + np.asarray(
                product.bias, np.float64
            )
            if product.added is not None:
                found = found + _row(product.added, row)
            gates += np.split(found, num)
        held = [jnp.asarray(_row(one, row), jnp.float32) for one in carried]
        gates = [jnp.asarray(gate, jnp.float32) for gate in gates]
        rows.append(KINDS[kind].finish(gates, held))
    return tuple(jnp.stack(states).astype(dtype) for states in zip(*rows, strict=True))


def _row(rows: RowsAt, row: int) -> np.ndarray:
    place = row if rows.index is None else int(rows.index[row])
    return np.asarray(rows.values[place], np.float64)
