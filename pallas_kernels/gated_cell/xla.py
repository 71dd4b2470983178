"""Gated cells in plain XLA: gathers, products, and gates, for every platform and sharding."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.gated_cell.kinds import KINDS, Kind
from pallas_kernels.gated_cell.operands import Product, RowsAt
from pallas_kernels.matmul import matmul


def gated_cell(
    kind: Kind, products: Sequence[Product], carried: Sequence[RowsAt]
) -> tuple[Float[Array, "batch hidden"], ...]:
    """See `api.gated_cell`."""
    gates: list[jax.Array] = []
    for product, num in zip(products, KINDS[kind].num_gates, strict=True):
        parts = [rows.gathered() for rows in product.rows]
        x = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
        found = matmul(x, product.weight) + product.bias
        if product.added is not None:
            found = found + product.added.gathered()
        gates += jnp.split(found, num, axis=-1)
    return KINDS[kind].finish(gates, [rows.gathered() for rows in carried])
