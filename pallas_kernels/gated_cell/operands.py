"""The operands of a gated cell: rows of arrays, and products of such rows with weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, final

import jax
from jaxtyping import Array, Shaped

from pallas_kernels.gated_cell.kinds import Kind


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowsAt:
    """Some rows of an array, which need not be copied beside each other.

    Attributes:
      values: [num, width].
      index: int32 [batch], valid numbers of rows; None for all rows in their order.
    """

    values: Any
    index: Any = None

    @property
    def shape(self) -> tuple[int, int]:
        num, width = self.values.shape
        return (num if self.index is None else self.index.shape[0], width)

    def gathered(self) -> Shaped[Array, "batch width"]:
        """Return the rows as an array of their own."""
        if self.index is None:
            return self.values
        return self.values.at[self.index].get(mode="promise_in_bounds")


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Product:
    """Rows side by side, times a weight, plus a bias, plus rows that are products already.

    Attributes:
      rows: parts of each row of the product, from left to right.
      weight: [sum of the widths, gates * hidden].
      bias: [gates * hidden].
      added: rows of an array [num, gates * hidden]; None for none.
    """

    rows: tuple[RowsAt, ...]
    weight: Any
    bias: Any
    added: RowsAt | None = None


@final
@dataclass(frozen=True)
class GatedCell:
    """One step of a cell, as `gated_cell` takes it.

    Attributes:
      kind: see `KINDS`; or "lookup" for `gated_tasks` alone, whose new states are those of
        `carried`, without a product.
      carried: states [batch, hidden] that the gates scale.
    """

    kind: Kind | Literal["lookup"]
    products: tuple[Product, ...]
    carried: tuple[RowsAt, ...]


def rows_at(*given: jax.Array | RowsAt) -> tuple[RowsAt, ...]:
    """Return arrays [batch, width] as all of their rows; `RowsAt` stay as they are."""
    return tuple(one if isinstance(one, RowsAt) else RowsAt(one) for one in given)
