"""A model of cells: what `CellRuntime` is created with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from jaxserve.cells.base import BaseCell
from jaxserve.cells.graph import Graph
from jaxserve.core.errors import EmptyGraphError, TokenOutOfRangeError


@final
@dataclass(frozen=True)
class CellModel:
    """Cells, and the function that unfolds an input into a graph of them.

    rngs = nnx.Rngs(0)
    model = sequence_model(Embedded(LSTM(256, 256, rngs=rngs), 30_000, rngs=rngs))
    with CellRuntime(model.cells, model.unfold) as rt:
        rt.generate([[1, 2, 3], [4, 5]])
    """

    cells: tuple[BaseCell, ...]
    unfold: Callable[[Any], Graph]


def checked_tokens(tokens: Sequence[int], vocab_size: int) -> list[int]:
    """Return tokens as a list.

    Raises:
      EmptyGraphError: there are none.
      TokenOutOfRangeError: one of them is not in the vocabulary.
    """
    found = [int(token) for token in tokens]
    if not found:
        raise EmptyGraphError("the input has no tokens; pass at least one")
    for token in found:
        if not 0 <= token < vocab_size:
            raise TokenOutOfRangeError(
                f"token {token} is not in the vocabulary; tokens are 0 to {vocab_size - 1}"
            )
    return found
