"""Binary TreeLSTM: a leaf cell for every word, an internal cell for every pair of subtrees.

Tai, Socher and Manning, 2015 (arXiv:1503.00075), section 3.2 with N = 2. As in the constituency
trees there, words are at the leaves only, and internal cells have no `x`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxserve.cells.base import BATCH_SIZES
from jaxserve.cells.blocks import NestedTree, numbered
from jaxserve.cells.cell import Cell
from jaxserve.cells.graph import Graph
from jaxserve.cells.models.bundle import CellModel, checked_tokens
from jaxserve.cells.models.recurrent import uniform
from jaxserve.cells.values import ValueSpec
from pallas_kernels import matmul

# A token, or a pair of trees.
Tree: TypeAlias = NestedTree


@final
class Leaf(nnx.Module):
    """The cell of a word: no forget gate, since nothing is below it.

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
        x = self.table[...][token]
        i, o, u = jnp.split(matmul(x, self.kernel[...]) + self.bias[...], 3, axis=-1)
        c = jax.nn.sigmoid(i) * jnp.tanh(u)
        return {"h": jax.nn.sigmoid(o) * jnp.tanh(c), "c": c}


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
        self,
        left_h: Float[Array, "batch hidden"],
        left_c: Float[Array, "batch hidden"],
        right_h: Float[Array, "batch hidden"],
        right_c: Float[Array, "batch hidden"],
    ) -> dict[str, jax.Array]:
        both = jnp.concatenate([left_h, right_h], axis=-1)
        gates = matmul(both, self.kernel[...]) + self.bias[...]
        i, left_f, right_f, o, u = jnp.split(gates, 5, axis=-1)
        c = (
            jax.nn.sigmoid(i) * jnp.tanh(u)
            + jax.nn.sigmoid(left_f) * left_c
            + jax.nn.sigmoid(right_f) * right_c
        )
        return {"h": jax.nn.sigmoid(o) * jnp.tanh(c), "c": c}


def tree_lstm_model(
    leaf: Leaf,
    internal: Internal,
    *,
    leaf_batch_sizes: Sequence[int] = BATCH_SIZES,
    internal_batch_sizes: Sequence[int] = BATCH_SIZES,
) -> CellModel:
    """Return a model whose inputs are `Tree`s, and whose results have the root's states.

    Internal cells have priority over leaves (thesis, 2.4.3).
    """
    token = {"token": ValueSpec((), jnp.dtype(jnp.int32))}
    states = ("left_h", "left_c", "right_h", "right_c")
    spec = ValueSpec((internal.hidden_size,), jnp.dtype(jnp.float32))
    leaf_cell = Cell(leaf, token, name="leaf", batch_sizes=leaf_batch_sizes)
    internal_cell = Cell(
        internal,
        dict.fromkeys(states, spec),
        name="internal",
        priority=1,
        batch_sizes=internal_batch_sizes,
    )

    def unfold(tree: Tree) -> Graph:
        tokens, pairs = numbered(tree)
        root = internal_cell.tree(
            leaf_cell,
            {"token": checked_tokens(tokens, leaf.vocab_size)},
            pairs,
            left={"left_h": "h", "left_c": "c"},
            right={"right_h": "h", "right_c": "c"},
        )
        return Graph(outputs={"h": root["h"], "c": root["c"]})

    return CellModel((leaf_cell, internal_cell), unfold)
