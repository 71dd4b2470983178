"""How the pairs of a binary tree join its nodes: from nested tuples, or from arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, final

import numpy as np

from jaxserve.cells.lru_cache import LRUCache
from jaxserve.core.errors import InvalidGraphError

# A number, such as a token, or a pair of trees.
NestedTree: TypeAlias = "int | tuple[NestedTree, NestedTree]"

# The kinds of the parts of a tree.
_NUMBER, _PAIR = 0, 1


@final
class TreeShape:
    """The shape of trees that differ only in their leaves. Leaves are numbered first, then pairs.

    Attributes:
      key: equal for equal shapes.
      pairs: int32 [leaves - 1, 2], the numbers of the left and the right node of each pair.
      leftmost: int32 [nodes], the leftmost leaf below each node.
    """

    __slots__ = ("key", "pairs", "leftmost")

    def __init__(self, pairs: np.ndarray):
        self.key = pairs.tobytes()
        self.pairs = pairs
        leftmost = list(range(len(pairs) + 1))
        for left in pairs[:, 0].tolist():
            leftmost.append(leftmost[left])
        self.leftmost = np.array(leftmost, np.int32)


# Shapes of nested tuples, by the kinds of their parts.
_shapes: LRUCache[bytes, TreeShape] = LRUCache(1 << 14)


def numbered(tree: NestedTree) -> tuple[list[int], TreeShape]:
    """Return the numbers at a tree's leaves, and its shape, for `BaseCell.tree`.

    Leaves are numbered from left to right, and a pair after both of its nodes.

    Raises:
      InvalidGraphError: a tuple of the tree is not a pair.
    """
    leaves: list[int] = []
    kinds = bytearray()  # of all parts, each before its members
    open: list[Any] = [tree]  # without recursion: a tree may be as deep as its sentence is long
    while open:
        part = open.pop()
        while isinstance(part, tuple):
            if len(part) != 2:
                raise InvalidGraphError(
                    f"a part of the tree has {len(part)} members; pass a token or a pair"
                )
            kinds.append(_PAIR)
            part, right = part
            open.append(right)
        leaves.append(part)
        kinds.append(_NUMBER)
    key = bytes(kinds)
    return leaves, _shapes.get(key) or _shapes.add(key, _shape(key), len(key))


def _shape(kinds: bytes) -> TreeShape:
    num = kinds.count(_NUMBER)
    leaf, node, after = 0, 0, num
    open: list[int] = []  # for each incomplete pair: its left node, or -1
    numbers: list[int] = []
    for kind in kinds:
        if kind == _PAIR:
            open.append(-1)
            continue
        node = leaf
        leaf += 1
        while open:
            left = open[-1]
            if left < 0:
                open[-1] = node
                break
            open.pop()
            numbers += (left, node)
            node = after
            after += 1
    return TreeShape(np.array(numbers, np.int32).reshape(-1, 2))


def checked_pairs(
    cell: str, pairs: Sequence[Sequence[int]] | np.ndarray, num_leaves: int
) -> np.ndarray:
    """Return the pairs of a tree as an array; raises InvalidGraphError if they form no tree."""
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
