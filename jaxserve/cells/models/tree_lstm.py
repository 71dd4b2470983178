"""Binary TreeLSTM: a leaf cell for every word, an internal cell for every pair of subtrees.

Tai, Socher and Manning, 2015 (arXiv:1503.00075), section 3.2 with N = 2. As in the constituency
trees there, words are at the leaves only, and internal cells have no `x`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int32

from jaxserve.cells.base import BATCH_SIZES
from jaxserve.cells.cell import Cell
from jaxserve.cells.graph import Graph
from jaxserve.cells.models.bundle import CellModel, checked_tokens
from jaxserve.cells.models.recurrent import Batch, states_of, uniform
from jaxserve.cells.tree_shape import NestedTree, numbered
from jaxserve.cells.values import ValueSpec
from jaxserve.kernels import Product, RowsAt
from jaxserve.kernels.gated_cell import GatedCell, rows_at

# A token, or a pair of trees.
Tree: TypeAlias = NestedTree


@final
class Leaf(nnx.Module):
    """The cell of a word, which has no forget gate since it has no children.

    Attributes:
      table: [vocab_size, input_size], the embedding.
      kernel: [input_size, 3 * hidden_size], gates in the order i, o, u; bias: [3 * hidden_size].
    """

    def __init__(self, vocab_size: int, input_size: int, hidden_size: int, *, rngs: nnx.Rngs):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.table = nnx.Param(jax.random.normal(rngs.params(), (vocab_size, input_size)))
        self.kernel = uniform(rngs, (input_size, 3 * hidden_size), hidden_size)
        self.bias = uniform(rngs, (3 * hidden_size,), hidden_size)

    def __call__(self, token: Int32[Array, " batch"]) -> dict[str, jax.Array]:
        return states_of(self.as_gated_cell(token))

    def as_gated_cell(self, token: Int32[Array, " batch"]) -> GatedCell:
        words = RowsAt(self.table[...], token)
        product = Product((words,), self.kernel[...], self.bias[...])
        return GatedCell("tree_leaf", (product,), ())


@final
class Internal(nnx.Module):
    """The cell of a pair of subtrees, with one forget gate for each.

    Attributes:
      kernel: [2 * hidden_size, 5 * hidden_size] for [left h, right h], gates in the order i, left
        f, right f, o, u; bias: [5 * hidden_size].
    """

    def __init__(self, hidden_size: int, *, rngs: nnx.Rngs):
        self.hidden_size = hidden_size
        self.kernel = uniform(rngs, (2 * hidden_size, 5 * hidden_size), hidden_size)
        self.bias = uniform(rngs, (5 * hidden_size,), hidden_size)

    def __call__(
        self, left_h: Batch, left_c: Batch, right_h: Batch, right_c: Batch
    ) -> dict[str, jax.Array]:
        return states_of(self.as_gated_cell(left_h, left_c, right_h, right_c))

    def as_gated_cell(
        self, left_h: Batch, left_c: Batch, right_h: Batch, right_c: Batch
    ) -> GatedCell:
        product = Product(rows_at(left_h, right_h), self.kernel[...], self.bias[...])
        return GatedCell("tree_internal", (product,), rows_at(left_c, right_c))


class LeafCell(Protocol):
    """A module that takes a token and returns h and c: a `Leaf`, or a `FoldedLeaf`."""

    @property
    def vocab_size(self) -> int: ...

    def __call__(self, *args: Any, **named: Any) -> dict[str, jax.Array]: ...


def tree_lstm_model(
    leaf: LeafCell,
    internal: Internal,
    *,
    leaf_batch_sizes: Sequence[int] = BATCH_SIZES,
    internal_batch_sizes: Sequence[int] = BATCH_SIZES,
    returns: Sequence[str] = ("h", "c"),
) -> CellModel:
    """Return a model whose inputs are `Tree`s, and whose results have the root's states `returns`.

    Internal cells have priority over leaves (thesis, 2.4.3).
    """
    token = {"token": ValueSpec((), jnp.dtype(jnp.int32))}
    states = ("left_h", "left_c", "right_h", "right_c")
    spec = ValueSpec((internal.hidden_size,), jnp.dtype(jnp.float32))
    given: Any = leaf
    leaf_cell = Cell(given, token, name="leaf", batch_sizes=leaf_batch_sizes, takes_rows=True)
    internal_cell = Cell(
        internal,
        dict.fromkeys(states, spec),
        name="internal",
        priority=1,
        batch_sizes=internal_batch_sizes,
        takes_rows=True,
    )

    def unfold(tree: Tree) -> Graph:
        tokens, shape = numbered(tree)
        root = internal_cell.tree(
            leaf_cell,
            {"token": checked_tokens(tokens, leaf.vocab_size)},
            shape,
            left={"left_h": "h", "left_c": "c"},
            right={"right_h": "h", "right_c": "c"},
        )
        return Graph(outputs={state: root[state] for state in returns})

    return CellModel((leaf_cell, internal_cell), unfold)
