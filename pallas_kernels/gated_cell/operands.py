"""The operands of a gated cell: rows of arrays, and products of such rows with weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

Kind = Literal["lstm", "gru", "tree_leaf", "tree_internal"]


@final
@dataclass(frozen=True)
class CellKind:
    """A kind of gated cell.

    Attributes:
      num_gates: number of gates of each product, in the order of the products.
      num_carried: number of states that the gates scale.
      num_outputs: number of new states.
      finish: function from the gates before their activations and the carried states, each
        [batch, hidden], to the new states.
    """

    num_gates: tuple[int, ...]
    num_carried: int
    num_outputs: int
    finish: Callable[[Sequence[jax.Array], Sequence[jax.Array]], tuple[jax.Array, ...]]


def _lstm(gates: Sequence[jax.Array], carried: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    i, f, g, o = gates
    (c,) = carried
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _gru(gates: Sequence[jax.Array], carried: Sequence[jax.Array]) -> tuple[jax.Array]:
    r_x, z_x, n_x, r_h, z_h, n_h = gates
    (h,) = carried
    r, z = jax.nn.sigmoid(r_x + r_h), jax.nn.sigmoid(z_x + z_h)
    n = jnp.tanh(n_x + r * n_h)
    return ((1 - z) * n + z * h,)


def _tree_leaf(
    gates: Sequence[jax.Array], carried: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    i, o, u = gates
    c = jax.nn.sigmoid(i) * jnp.tanh(u)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _tree_internal(
    gates: Sequence[jax.Array], carried: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    i, left_f, right_f, o, u = gates
    left_c, right_c = carried
    c = (
        jax.nn.sigmoid(i) * jnp.tanh(u)
        + jax.nn.sigmoid(left_f) * left_c
        + jax.nn.sigmoid(right_f) * right_c
    )
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


# The products and the carried states of each kind, in order:
# lstm: [x, h]; c. gru: x and h, each with its own weight; h. tree_leaf: x; none.
# tree_internal: [left h, right h]; left c and right c.
KINDS: Mapping[Kind, CellKind] = MappingProxyType(
    {
        "lstm": CellKind((4,), 1, 2, _lstm),
        "gru": CellKind((3, 3), 1, 1, _gru),
        "tree_leaf": CellKind((3,), 0, 2, _tree_leaf),
        "tree_internal": CellKind((5,), 2, 2, _tree_internal),
    }
)


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowsAt:
    """Some rows of an array, which need not be contiguous.

    Attributes:
      values: [num, width].
      index: int32 [batch], valid row numbers; None for all rows in order.
    """

    values: Any
    index: Any = None

    @property
    def shape(self) -> tuple[int, int]:
        num, width = self.values.shape
        return (num if self.index is None else self.index.shape[0], width)

    def gathered(self) -> Shaped[Array, "batch width"]:
        """Return the rows as a new array."""
        if self.index is None:
            return self.values
        return self.values.at[self.index].get(mode="promise_in_bounds")


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Product:
    """Concatenated rows times a weight, plus a bias, plus rows that are products already.

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
      kind: see `KINDS`; or "lookup", for `gated_tasks` only, which copies the carried states to
        the new ones, without a product.
      carried: states [batch, hidden] that the gates scale.
    """

    kind: Kind | Literal["lookup"]
    products: tuple[Product, ...]
    carried: tuple[RowsAt, ...]


def rows_at(*given: jax.Array | RowsAt) -> tuple[RowsAt, ...]:
    """Return arrays [batch, width] as all of their rows; `RowsAt` are unchanged."""
    return tuple(one if isinstance(one, RowsAt) else RowsAt(one) for one in given)
