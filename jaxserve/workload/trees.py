"""Binary trees over the words of sentences, as nested pairs of word numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from jaxserve.core.errors import InvalidConfigError

# The number of a word, or a pair of trees.
Tree: TypeAlias = "int | tuple[Tree, Tree]"


def random_tree(num_words: int, random: np.random.Generator) -> Tree:
    """Return a binary tree over words 0 to `num_words - 1` (at least one), in their order.

    Every span of words is split in two at a uniformly drawn place.
    """
    if num_words < 1:
        raise InvalidConfigError(f"a tree has {num_words} words; pass at least 1")
    done: list[Tree] = []
    # (first word, number of words); None: join the last two trees. Trees may be deep.
    open: list[tuple[int, int] | None] = [(0, num_words)]
    while open:
        part = open.pop()
        if part is None:
            right = done.pop()
            done.append((done.pop(), right))
            continue
        first, num = part
        if num == 1:
            done.append(first)
            continue
        cut = int(random.integers(1, num))
        open += [None, (first + cut, num - cut), (first, cut)]
    return done.pop()


def random_trees(lengths: Sequence[int], seed: int) -> list[Tree]:
    random = np.random.default_rng([seed, 2])
    return [random_tree(length, random) for length in lengths]


def complete_tree(num_words: int = 16) -> Tree:
    """Return the complete binary tree of figure 2.15; `num_words` must be a power of two."""
    if num_words < 1 or num_words & (num_words - 1):
        raise InvalidConfigError(
            f"a complete tree has {num_words} words; pass a power of two, such as 16"
        )
    row: list[Tree] = list(range(num_words))
    while len(row) > 1:
        row = [(row[i], row[i + 1]) for i in range(0, len(row), 2)]
    return row[0]


def with_tokens(tree: Tree, tokens: Sequence[int]) -> Tree:
    done: list[Tree] = []
    open: list[Tree | None] = [tree]
    while open:
        part = open.pop()
        if part is None:
            right = done.pop()
            done.append((done.pop(), right))
        elif isinstance(part, tuple):
            open += [None, part[1], part[0]]
        else:
            done.append(tokens[part])
    return done.pop()
