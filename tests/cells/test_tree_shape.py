"""The shapes of trees, from nested tuples and from pairs."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import pytest

from jaxserve.cells.tree_shape import numbered
from jaxserve.core.errors import InvalidGraphError

pytestmark = pytest.mark.fast


class _Token(IntEnum):
    """Numbers that are not plain ones."""

    A = 7
    B = 9


def test_leaves_are_numbered_from_left_to_right():
    """A pair follows both of its nodes."""
    leaves, shape = numbered(((5, (3, 4)), (1, 2)))
    assert list(leaves) == [5, 3, 4, 1, 2]
    assert shape.pairs.tolist() == [[1, 2], [0, 5], [3, 4], [6, 7]]
    assert shape.leftmost.tolist() == [0, 1, 2, 3, 4, 1, 0, 3, 0]


def test_one_leaf_is_a_tree():
    """It has no pairs."""
    leaves, shape = numbered(5)
    assert list(leaves) == [5] and shape.pairs.shape == (0, 2)


@pytest.mark.parametrize(
    "tree",
    [(_Token.A, (_Token.B, 3)), (np.int64(7), (np.int32(9), 3)), (7, (9, True)), ((7, 2**40), 3)],
)
def test_leaves_may_be_other_numbers(tree: Any):
    """They are what they were, and the shape is that of a tree of plain numbers."""
    leaves, shape = numbered(tree)
    plain = ((1, 2), 3) if isinstance(tree[0], tuple) else (1, (2, 3))
    assert shape is numbered(plain)[1]
    flat = (*tree[0], tree[1]) if isinstance(tree[0], tuple) else (tree[0], *tree[1])
    assert tuple(leaves) == flat


@pytest.mark.parametrize(
    "tree", [(1, (2, 3, 4)), ((1, 2, 3), (4,)), (), (1, ()), ((1,), (2, 3, 4))]
)
def test_a_part_of_other_members_is_refused(tree: Any):
    """Also if as many members are missing elsewhere."""
    with pytest.raises(InvalidGraphError, match="members"):
        numbered(tree)


def test_a_tree_may_be_as_deep_as_its_sentence_is_long():
    """Each of 3,000 pairs joins the tree so far and a leaf."""
    tree: Any = 0
    for number in range(1, 3001):
        tree = (tree, number)
    leaves, shape = numbered(tree)
    assert list(leaves) == list(range(3001))
    assert shape.pairs[0].tolist() == [0, 1] and shape.pairs[-1].tolist() == [5999, 3000]


def test_equal_shapes_are_one_object():
    """Whatever their leaves are."""
    assert numbered(((1, 2), 3))[1] is numbered(((4, 5), 6))[1]
    assert numbered((1, (2, 3)))[1] is not numbered(((1, 2), 3))[1]
