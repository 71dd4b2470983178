"""Gated cells in plain XLA: gathers, products, and gates, for every platform and sharding."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.kernels.gated_cell.operands import KINDS, Kind, Product, RowsAt
from jaxserve.kernels.matmul import matmul


def gated_cell(
    kind: Kind, products: Sequence[Product], carried: Sequence[RowsAt]
) -> tuple[Float[Array, "batch hidden"], ...]:
    parts = [[rows.gathered() for rows in product.rows] for product in products]
    added = [None if one.added is None else one.added.gathered() for one in products]
    states = [rows.gathered() for rows in carried]
    # Each array is read once, before a new state is there. Otherwise XLA reads it again in the
    # operation of each state, and copies it if its rows are replaced by the first of them.
    parts, added, states = lax.optimization_barrier((parts, added, states))
    gates: list[jax.Array] = []
    for number, (product, num) in enumerate(zip(products, KINDS[kind].num_gates, strict=True)):
        mine, more = parts[number], added[number]
        x = mine[0] if len(mine) == 1 else jnp.concatenate(mine, axis=-1)
        found = matmul(x, product.weight) + product.bias
        if more is not None:
            found = found + more
        gates += jnp.split(found, num, axis=-1)
    return KINDS[kind].finish(gates, states)
