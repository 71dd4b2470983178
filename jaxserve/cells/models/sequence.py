"""A recurrent network that reads a sentence, one cell for each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.cells.base import BATCH_SIZES, Node
from jaxserve.cells.cell import Cell
from jaxserve.cells.graph import Graph
from jaxserve.cells.models.bundle import CellModel, checked_tokens
from jaxserve.cells.models.recurrent import Embedded, token_inputs


def sequence_model(
    module: Embedded, *, name: str | None = None, batch_sizes: Sequence[int] = BATCH_SIZES
) -> CellModel:
    """Return a model whose inputs are lists of tokens, and whose results have the last states.

    States begin at zero. `module` is `Embedded` around an `LSTM`, a `GRU`, or several of them
    (`Stacked`).
    """
    cell = token_cell(module, name=name, batch_sizes=batch_sizes)

    def unfold(tokens: Sequence[int]) -> Graph:
        node = read(cell, module, tokens)
        return Graph(outputs={state: node[state] for state in module.step.state})

    return CellModel((cell,), unfold)


def token_cell(module: Embedded, *, name: str | None, batch_sizes: Sequence[int]) -> Cell:
    """Return the cell of a step that reads a token."""
    name = type(module.step).__name__.lower() if name is None else name
    return Cell(
        module, token_inputs(module.step), name=name, batch_sizes=batch_sizes, takes_rows=True
    )


def read(cell: Cell, module: Embedded, tokens: Sequence[int]) -> Node:
    """Return the last node of a chain that reads the tokens.

    Raises:
      EmptyGraphError, TokenOutOfRangeError: see `checked_tokens`.
    """
    states = module.step.state
    zeros: dict[str, Any] = dict.fromkeys(states, 0.0)
    given = {"token": checked_tokens(tokens, module.vocab_size)}
    return cell.chain(given, dict(zip(states, states, strict=True)), **zeros)
