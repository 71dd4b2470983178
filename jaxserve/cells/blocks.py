"""Many nodes that one call makes: a chain, or a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from jaxserve.core.errors import InvalidGraphError

# A number, such as a token, or a pair of trees.
NestedTree: TypeAlias = "int | tuple[NestedTree, NestedTree]"


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
      pairs: int32 [num_leaves - 1, 2], the numbers of the left and the right node of each pair.
    """

    form: TreeForm
    each: tuple[np.ndarray, ...]
    pairs: np.ndarray

    @property
    def leaf(self) -> Any:
        return self.form.leaf

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


def numbered(tree: NestedTree) -> tuple[list[int], np.ndarray]:
    """Return the numbers at a tree's leaves, and the pairs that join them, for `BaseCell.tree`.

    Raises:
      InvalidGraphError: a part of the tree is neither a number nor a pair.
    """
    leaves: list[int] = []
    numbers: list[int] = []  # of the left and the right node of each pair
    # Without recursion: a tree may be as deep as its sentence is long. Pair i is -1 - i here.
    done: list[int] = []
    open: list[NestedTree | None] = [tree]  # None: join the last two
    num_pairs = 0
    while open:
        part = open.pop()
        if part is None:
            right = done.pop()
            numbers += (done.pop(), right)
        elif isinstance(part, tuple):
            if len(part) != 2:
                raise InvalidGraphError(
                    f"a part of the tree has {len(part)} members; pass a token or a pair"
                )
            left, right = part
            if isinstance(left, tuple) or isinstance(right, tuple):
                open += (None, right, left)
                continue
            num = len(leaves)
            leaves += (left, right)
            numbers += (num, num + 1)
        else:
            done.append(len(leaves))
            leaves.append(part)
            continue
        num_pairs += 1
        done.append(-num_pairs)
    found = np.array(numbers, np.int32).reshape(-1, 2)
    return leaves, np.where(found < 0, len(leaves) - 1 - found, found)


def checked_pairs(
    cell: str, pairs: Sequence[Sequence[int]] | np.ndarray, num_leaves: int
) -> np.ndarray:
    """Return the pairs of a tree as an array.

    Raises:
      InvalidGraphError: they join another number of leaves, later nodes, or a node twice.
    """
    found = np.array(pairs, np.int32)
    numbers = found.ravel().tolist()
    if (
        found.shape != (num_leaves - 1, 2)
        or len(set(numbers)) < len(numbers)
        or min(numbers) < 0
        or (found >= np.arange(num_leaves, 2 * num_leaves - 1)[:, None]).any()
    ):
        raise InvalidGraphError(
            f"a tree of cell {cell!r} with {num_leaves} leaves was given pairs of shape "
            f"{list(found.shape)}; pass {num_leaves - 1} pairs of earlier nodes that join each "
            "node but the last one once"
        )
    return found
