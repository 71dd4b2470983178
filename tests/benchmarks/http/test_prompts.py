"""Prompts that come once."""

from __future__ import annotations

import pytest

from benchmarks.http.ways import DistinctPrompts
from jaxserve.workload import random_items

pytestmark = pytest.mark.release


def test_no_prompt_comes_twice():
    """The same requests get other first tokens each time, of the workload's, and keep the rest."""
    items = random_items(5, num_prompt_tokens=9, num_output_tokens=2, vocab_size=50, seed=0)
    known = {token for item in items for token in item.prompt_token_ids}
    prompts = DistinctPrompts(items)
    found = [prompts.of(items) for _ in range(100)]
    begins = [one.prompt_token_ids[:4] for turn in found for one in turn]
    assert len(set(begins)) == 500 and known.issuperset(token for one in begins for token in one)
    for turn in found:
        for one, item in zip(turn, items, strict=True):
            assert one.prompt_token_ids[4:] == item.prompt_token_ids[4:]
            assert one.num_output_tokens == item.num_output_tokens


def test_short_prompts_keep_their_length():
    """A prompt of fewer tokens than are replaced is replaced as a whole."""
    items = random_items(3, num_prompt_tokens=2, num_output_tokens=2, vocab_size=50, seed=0)
    prompts = [one.prompt_token_ids for one in DistinctPrompts(items).of(items)]
    assert {len(prompt) for prompt in prompts} == {2} and len(set(prompts)) == 3
