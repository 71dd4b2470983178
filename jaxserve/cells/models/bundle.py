"""A model of cells, from which a `CellRuntime` is created."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

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


def checked_tokens(tokens: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Return tokens as an int32 array [tokens].

    Raises:
      EmptyGraphError: there are none.
      TokenOutOfRangeError: one of them is not in the vocabulary.
    """
    found = np.asarray(tokens)
    if found.dtype.kind not in "iu" or found.ndim != 1:
        found = np.array([int(token) for token in tokens])
    if not found.size:
        raise EmptyGraphError("the input has no tokens; pass at least one")
    # As unsigned numbers, negative ones are large.
    if found.view(f"u{found.itemsize}").max() >= vocab_size:
        wrong = found[(found < 0) | (found >= vocab_size)]
        raise TokenOutOfRangeError(
            f"token {wrong[0]} is not in the vocabulary; tokens are 0 to {vocab_size - 1}"
        )
    return found.astype(np.int32)
