"""A recurrent network that reads a sentence, one cell for each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.cells.base import BATCH_SIZES
from jaxserve.cells.cell import Cell
from jaxserve.cells.graph import Graph
from jaxserve.cells.models.bundle import CellModel, checked_tokens
from jaxserve.cells.models.recurrent import Embedded, Reader, token_inputs
from jaxserve.cells.nodes import Node


def sequence_model(
    module: Reader,
    *,
    name: str | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    returns: Sequence[str] | None = None,
) -> CellModel:
    """Return a model whose inputs are lists of tokens, and whose results have the last states.

    States begin at zero. `module` is `Embedded` around an `LSTM`, a `GRU`, or several of them
    (`Stacked`), or a `FoldedLSTM`.

    Args:
      returns: the states that results have; all by default.
    """
    cell = token_cell(module, name=name, batch_sizes=batch_sizes)

    def unfold(tokens: Sequence[int]) -> Graph:
        node = read(cell, module, tokens)
        return Graph(outputs={state: node[state] for state in returns or module.state})

    return CellModel((cell,), unfold)


def token_cell(module: Reader, *, name: str | None, batch_sizes: Sequence[int]) -> Cell:
    """Return the cell of a step that reads a token."""
    if name is None:
        step = module.step if isinstance(module, Embedded) else module
        name = type(step).__name__.lower()
    given: Any = module
    return Cell(given, token_inputs(module), name=name, batch_sizes=batch_sizes, takes_rows=True)


def read(cell: Cell, module: Reader, tokens: Sequence[int]) -> Node:
    """Return the last node of a chain that reads the tokens.

    Raises:
      EmptyGraphError, TokenOutOfRangeError: see `checked_tokens`.
    """
    states = module.state
    zeros: dict[str, Any] = dict.fromkeys(states, 0.0)
    given = {"token": checked_tokens(tokens, module.vocab_size)}
    return cell.chain(given, dict(zip(states, states, strict=True)), **zeros)
