"""Lengths of sentences and random trees."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload.items import arrival_times
from jaxserve.workload.sentences import (
    LONGEST,
    SentenceLengths,
    draw_treebank_lengths,
    target_lengths,
    treebank_lengths,
)
from jaxserve.workload.trees import complete_tree, random_tree, random_trees, with_tokens


def _leaves(tree):
    return [tree] if isinstance(tree, int) else [*_leaves(tree[0]), *_leaves(tree[1])]


def _depth(tree):
    return 0 if isinstance(tree, int) else 1 + max(_depth(tree[0]), _depth(tree[1]))


def test_lengths_are_those_of_the_thesis():
    """The mean is 24, 99 % are below 100, and the longest of 100,000 is near 330."""
    lengths = np.array(SentenceLengths().draw(100_000, seed=0))
    assert abs(lengths.mean() - 24) < 0.3
    assert abs((lengths < 100).mean() - 0.99) < 0.001
    assert lengths.min() >= 1 and 250 < lengths.max() <= LONGEST


def test_lengths_are_cut_and_repeat_with_their_seed():
    """Longer sentences are drawn again, not shortened."""
    lengths = SentenceLengths(50).draw(2000, seed=1)
    assert max(lengths) <= 50 and lengths.count(50) < 20
    assert lengths == SentenceLengths(50).draw(2000, seed=1) != SentenceLengths(50).draw(2000, 2)
    with pytest.raises(InvalidConfigError, match="1 to 330"):
        SentenceLengths(331)


def test_lengths_of_real_sentences():
    """The treebank has 42,068 sentences with a mean of 21 words, the longest with 82."""
    lengths = np.array(treebank_lengths())
    assert (len(lengths), lengths.max()) == (42_068, 82) and abs(lengths.mean() - 21) < 0.5
    drawn = draw_treebank_lengths(50, seed=1)
    assert drawn == draw_treebank_lengths(50, seed=1) and set(drawn) <= set(treebank_lengths())


def test_translations_are_about_as_long():
    """The factor's median is 1, and no translation is empty or too long."""
    targets = np.array(target_lengths([100] * 2000, seed=0))
    assert abs(np.median(targets) - 100) < 3 and 20 < targets.std() < 32
    assert min(target_lengths([1] * 100, seed=0)) == 1
    assert max(target_lengths([330] * 100, seed=0)) == 330


def test_random_trees_have_their_words_in_order():
    """Every word is a leaf once; a seed gives the same trees; deep trees need no recursion."""
    for tree, num in zip(random_trees([1, 2, 9, 40], seed=3), [1, 2, 9, 40], strict=True):
        assert _leaves(tree) == list(range(num))
    assert random_trees([30], 3) == random_trees([30], 3) != random_trees([30], 4)
    assert _leaves(with_tokens(complete_tree(4), [7, 8, 9, 6])) == [7, 8, 9, 6]
    with pytest.raises(InvalidConfigError):
        random_tree(0, np.random.default_rng(0))


def test_complete_trees():
    """All words have one depth."""
    tree = complete_tree(16)
    assert _leaves(tree) == list(range(16)) and _depth(tree) == 4
    with pytest.raises(InvalidConfigError, match="power of two"):
        complete_tree(12)


def test_arrival_times_without_requests():
    """No request has no time, and the first arrives at 0."""
    assert arrival_times(0, "all", 0) == []
    assert arrival_times(3, "constant:2", 0) == [0.0, 2.0, 4.0]
