"""Steps whose products with embeddings are computed once, when the model is loaded.

Weights do not change while they serve, and a vocabulary has few tokens. So a table holds what a
cell computes from a token alone, one row for each token. That halves the products of an LSTM whose
embeddings are as wide as its states, and removes those of a TreeLSTM's leaves. The tables take more
memory than the embeddings: four times as much for such an LSTM, and twice as much for leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, final, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int32

from jaxserve.cells.models.recurrent import LSTM, Batch, Embedded, states_of
from jaxserve.cells.models.tree_lstm import Leaf
from jaxserve.core.errors import InvalidConfigError
from jaxserve.kernels import Product, RowsAt, matmul
from jaxserve.kernels.gated_cell import GatedCell, rows_at

# An array of rows, or a tree of such arrays.
_Rows = TypeVar("_Rows")
# Rows of a table that are computed together.
_CHUNK = 4096


@final
class FoldedLSTM(nnx.Module):
    """A step of an LSTM that takes a token; see `folded`.

    `table` [vocab_size, 4 * hidden_size] has the products of the embeddings with the weights of x;
    `kernel` [hidden_size, 4 * hidden_size] and `bias` are the weights of h.
    """

    state = LSTM.state

    def __init__(self, embedded: Embedded):
        step = embedded.step
        if not isinstance(step, LSTM):
            raise InvalidConfigError(
                f"an embedding before a {type(step).__name__} cannot be folded; pass one before an "
                "LSTM of one layer"
            )
        self.vocab_size, self.hidden_size = embedded.vocab_size, step.hidden_size
        kernel = step.kernel[...]
        of_x, of_h = kernel[: step.input_size], kernel[step.input_size :]
        table = embedded.table[...]
        self.table = nnx.Param(_in_chunks(lambda some: matmul(table[some], of_x), len(table)))
        self.kernel = nnx.Param(of_h)
        self.bias = nnx.Param(step.bias[...])

    def __call__(self, token: Int32[Array, " batch"], h: Batch, c: Batch) -> dict[str, jax.Array]:
        return states_of(self.as_gated_cell(token, h, c))

    def as_gated_cell(self, token: Int32[Array, " batch"], h: Batch, c: Batch) -> GatedCell:
        added = RowsAt(self.table[...], token)
        product = Product(rows_at(h), self.kernel[...], self.bias[...], added)
        return GatedCell("lstm", (product,), rows_at(c))


@final
class FoldedLeaf(nnx.Module):
    """The looked-up states of words, `h` and `c` [vocab_size, hidden_size]; see `folded`."""

    def __init__(self, leaf: Leaf):
        self.vocab_size, self.hidden_size = leaf.vocab_size, leaf.hidden_size
        tables = _in_chunks(leaf, leaf.vocab_size)
        self.h, self.c = nnx.Param(tables["h"]), nnx.Param(tables["c"])

    def __call__(self, token: Int32[Array, " batch"]) -> dict[str, jax.Array]:
        return {
            name: rows.gathered()
            for name, rows in zip("hc", self.as_gated_cell(token).carried, strict=True)
        }

    def as_gated_cell(self, token: Int32[Array, " batch"]) -> GatedCell:
        return GatedCell("lookup", (), tuple(RowsAt(t[...], token) for t in (self.h, self.c)))


@overload
def folded(module: Embedded) -> FoldedLSTM: ...
@overload
def folded(module: Leaf) -> FoldedLeaf: ...
def folded(module: Embedded | Leaf) -> FoldedLSTM | FoldedLeaf:
    """Return a module with the same results, up to rounding, that looks up what tokens determine.

    `sequence_model`, `Predicting` and `tree_lstm_model` take it instead of the module.

    Raises:
      InvalidConfigError: the step after the embedding is not an `LSTM`.
    """
    return FoldedLeaf(module) if isinstance(module, Leaf) else FoldedLSTM(module)


def _in_chunks(rows_of: Callable[[jax.Array], _Rows], num: int) -> _Rows:
    ids = jnp.arange(num, dtype=jnp.int32)
    chunks = [rows_of(ids[i : i + _CHUNK]) for i in range(0, num, _CHUNK)]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *chunks)
