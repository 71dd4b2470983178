"""Random prompts."""

from __future__ import annotations

import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload import random_items


def test_random_items_have_the_asked_shape():
    """Every prompt has the requested length and only ids in the vocabulary."""
    items = random_items(7, num_prompt_tokens=5, num_output_tokens=3, vocab_size=11, seed=0)
    assert [len(item.prompt_token_ids) for item in items] == [5] * 7
    assert {token for item in items for token in item.prompt_token_ids} <= set(range(11))
    assert {item.num_output_tokens for item in items} == {3}


def test_random_items_refuse_counts_below_one():
    """A count of zero raises a typed error that names it."""
    with pytest.raises(InvalidConfigError, match="num_output_tokens=0"):
        random_items(7, num_prompt_tokens=5, num_output_tokens=0, vocab_size=11, seed=0)
