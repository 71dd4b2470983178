"""Arrival times of a workload."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload import WorkloadItem, random_items
from jaxserve.workload.items import with_arrivals

ITEMS = [WorkloadItem(prompt_token_ids=(1,), num_output_tokens=1)] * 2000


def test_constant_and_at_once():
    """Arrivals are all at 0, or evenly spaced from 0 on."""
    assert {item.arrival_s for item in with_arrivals(ITEMS, "all", 0)} == {0.0}
    times = [item.arrival_s for item in with_arrivals(ITEMS[:4], "constant:0.5", 0)]
    assert times == [0.0, 0.5, 1.0, 1.5]
    assert with_arrivals([], "constant:0.5", 0) == []


def test_poisson_gaps_are_exponential():
    """Mean and standard deviation of the gaps are 1 / rate; a seed determines the draw."""
    times = [item.arrival_s for item in with_arrivals(ITEMS, "poisson:4", 1)]
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.25, rel=0.1)
    assert gaps.std() == pytest.approx(0.25, rel=0.1)
    assert times == [item.arrival_s for item in with_arrivals(ITEMS, "poisson:4", 1)]
    assert times != [item.arrival_s for item in with_arrivals(ITEMS, "poisson:4", 2)]


@pytest.mark.parametrize("pattern", ["", "often", "constant", "poisson:0", "constant:nan", "all:1"])
def test_other_patterns_are_refused(pattern):
    """The error lists the allowed patterns."""
    with pytest.raises(InvalidConfigError, match="constant:SECONDS"):
        with_arrivals(ITEMS, pattern, 0)


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
