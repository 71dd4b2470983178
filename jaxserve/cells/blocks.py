"""Many nodes that one call makes: a chain, or a tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np

if TYPE_CHECKING:
    from jaxserve.cells.base import BaseCell


@final
@dataclass(frozen=True)
class Chain:
    """The nodes of `BaseCell.chain`.

    Attributes:
      each: for each input, the constants of the nodes [num_nodes, ...]; None for others.
      carry: for each input, the output of the node before that it takes; -1 for none.
    """

    num_nodes: int
    each: tuple[np.ndarray | None, ...]
    carry: tuple[int, ...]


@final
@dataclass(frozen=True)
class Tree:
    """The nodes of `BaseCell.tree`, in the order of their numbers: leaves, and then pairs.

    Attributes:
      each: for each input of a leaf, the constants of the leaves [num_leaves, ...].
      pairs: int32 [num_leaves - 1, 2], the numbers of the left and the right node of each pair.
      sides: for each input of a pair: 0 if it is of the left node, 1 of the right one.
      outputs: for each input of a pair: the name of the output that it takes.
    """

    leaf: BaseCell
    each: tuple[np.ndarray, ...]
    pairs: np.ndarray
    sides: tuple[int, ...]
    outputs: tuple[str, ...]

    @property
    def num_leaves(self) -> int:
        return len(self.pairs) + 1

    @property
    def num_nodes(self) -> int:
        return 2 * len(self.pairs) + 1
