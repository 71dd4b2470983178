"""How the pairs of a binary tree join its nodes: from nested tuples, or from arrays."""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from typing import TypeAlias, final

import numpy as np

from jaxserve.cells.lru_cache import LRUCache
from jaxserve.core.errors import InvalidGraphError

# A number, such as a token, or a pair of trees.
NestedTree: TypeAlias = "int | tuple[NestedTree, NestedTree]"

# What `marshal` writes for a number, and for a tuple: a byte, and its value or length as an int32.
_NUMBER, _TUPLE = b"i", b"("
_RECORD = np.dtype([("kind", "u1"), ("value", "<i4")])


@final
class TreeShape:
    """The shape of trees that differ only in their leaves. Leaves are numbered first, then pairs.

    Attributes:
      key: equal shapes have equal keys if they are made in the same way.
      pairs: int32 [leaves - 1, 2], the numbers of the left and the right node of each pair.
      leftmost: int32 [nodes], the leftmost leaf below each node.
    """

    __slots__ = ("key", "pairs", "leftmost")

    def __init__(self, key: bytes, pairs: np.ndarray, leftmost: Sequence[int]):
        self.key = key
        self.pairs = pairs
        self.leftmost = np.array(leftmost, np.int32)

    @classmethod
    def of(cls, pairs: np.ndarray) -> TreeShape:
        leftmost = list(range(len(pairs) + 1))
        for left in pairs[:, 0].tolist():
            leftmost.append(leftmost[left])
        return cls(pairs.tobytes(), pairs, leftmost)


# Shapes of nested tuples, by the kinds of their parts.
_shapes: LRUCache[bytes, TreeShape] = LRUCache(1 << 14)


def numbered(tree: NestedTree) -> tuple[Sequence[int] | np.ndarray, TreeShape]:
    """Return the numbers at a tree's leaves, and its shape, for `BaseCell.tree`.

    Leaves are numbered from left to right, and a pair after both of its nodes.

    Raises:
      InvalidGraphError: a part of the tree is neither a number nor a pair.
    """
    leaves, kinds = _coded(tree) or _walked(tree)
    found = _shapes.get(kinds)
    return leaves, found or _shapes.add(kinds, _shape(kinds), len(kinds))


def _coded(tree: NestedTree) -> tuple[np.ndarray, bytes] | None:
    """Return the leaves of a tree, and the kinds of all parts, each before its members.

    `marshal` walks the parts without Python's interpreter. None if it cannot: for deep trees, and
    parts that are neither int32 numbers nor pairs.
    """
    try:
        data = marshal.dumps(tree, 2)
    except ValueError:
        return None
    kinds = data[:: _RECORD.itemsize]
    num_leaves = kinds.count(_NUMBER)
    if len(data) % _RECORD.itemsize or num_leaves + kinds.count(_TUPLE) < len(kinds):
        return None
    records = np.frombuffer(data, _RECORD)
    is_leaf, values = records["kind"] == _NUMBER[0], records["value"]
    if (values[~is_leaf] != 2).any():
        return None
    return values[is_leaf], kinds


def _walked(tree: NestedTree) -> tuple[list[int], bytes]:
    """Return the result of `_coded` for any tree; raises InvalidGraphError as `numbered` does."""
    leaves: list[int] = []
    kinds = bytearray()
    # Without recursion: a tree may be as deep as its sentence is long.
    open: list[NestedTree] = [tree]
    while open:
        part = open.pop()
        if not isinstance(part, tuple):
            leaves.append(part)
            kinds += _NUMBER
            continue
        if len(part) != 2:
            raise InvalidGraphError(
                f"a part of the tree has {len(part)} members; pass a token or a pair"
            )
        kinds += _TUPLE
        left, right = part
        open += (right, left)
    return leaves, bytes(kinds)


def _shape(kinds: bytes) -> TreeShape:
    num, pair = kinds.count(_NUMBER), _TUPLE[0]
    leaf, node, after = 0, 0, num
    open: list[int] = []  # for each incomplete pair: its left node, or -1
    numbers: list[int] = []
    leftmost = list(range(num))
    for kind in kinds:
        if kind == pair:
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
            leftmost.append(leftmost[left])
            node = after
            after += 1
    pairs = np.array(numbers, np.int32).reshape(-1, 2)
    return TreeShape(kinds, pairs, leftmost)


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
