"""Many nodes that one call makes: a chain, or a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np

from jaxserve.cells.tree_shape import TreeShape


@final
class ChainForm:
    """What chains share that differ in their lengths and in the constants of their nodes.

    Attributes:
      inputs: those of the first node, in the order of the cell's; None in place of constants.
      carry: see `Chain`.
    """

    __slots__ = ("inputs", "carry")

    def __init__(self, inputs: Sequence[Any], carry: tuple[int, ...]):
        self.inputs = inputs
        self.carry = carry


class Chain(NamedTuple):
    """The nodes of `BaseCell.chain`.

    Attributes:
      each: for each input, the constants of the nodes [num_nodes, ...]; None for others.
      carry: for each input, the output of the node before that it takes; -1 for none.
      form: the same object for chains that share it; None for others.
    """

    num_nodes: int
    each: tuple[np.ndarray | None, ...]
    carry: tuple[int, ...]
    form: ChainForm | None = None


@final
class TreeForm:
    """What trees share that differ in their pairs and in the constants of their leaves.

    Attributes:
      leaf: the `BaseCell` of the leaves.
      sides: for each input of a pair: 0 if it is of the left node, 1 of the right one.
      outputs: for each input of a pair: the name of the output that it takes.
    """

    __slots__ = ("leaf", "sides", "outputs")

    def __init__(self, leaf: Any, sides: tuple[int, ...], outputs: tuple[str, ...]):
        self.leaf = leaf
        self.sides = sides
        self.outputs = outputs


class Tree(NamedTuple):
    """The nodes of `BaseCell.tree`, in the order of their numbers: leaves, and then pairs.

    Attributes:
      form: the same object for trees that share it.
      each: for each input of a leaf, the constants of the leaves [num_leaves, ...].
      shape: how its pairs join the nodes.
    """

    form: TreeForm
    each: tuple[np.ndarray, ...]
    shape: TreeShape

    @property
    def leaf(self) -> Any:
        return self.form.leaf

    @property
    def pairs(self) -> np.ndarray:
        return self.shape.pairs

    @property
    def sides(self) -> tuple[int, ...]:
        return self.form.sides

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.form.outputs

    @property
    def num_leaves(self) -> int:
        return len(self.pairs) + 1

    @property
    def num_nodes(self) -> int:
        return 2 * len(self.pairs) + 1
