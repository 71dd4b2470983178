"""Guarantees of an engine's configuration, and the errors that it raises."""

from __future__ import annotations

import pytest

from jaxserve.core.config import EngineConfig, bucket, fine_slot_buckets, fine_token_buckets
from jaxserve.core.errors import InvalidConfigError

pytestmark = pytest.mark.fast


def test_fine_windows_have_little_room_to_spare():
    """For any number of slots over 8, padding is under a third, and the largest window has all."""
    for max_slots in range(1, 300):
        sizes = fine_slot_buckets(max_slots)
        assert sizes[0] == 1 and sizes[-1] == max_slots and list(sizes) == sorted(set(sizes))
        for num_live in range(9, max_slots + 1):
            size = bucket(num_live, sizes)
            assert size - num_live < size / 3, (max_slots, num_live)


def test_fine_steps_have_little_room_to_spare():
    """Up to 256 tokens padding is under a third, or under half where steps have less than 128."""
    for max_step_tokens in (*range(1, 300), 2048):
        sizes = fine_token_buckets(max_step_tokens)
        assert sizes[-1] == max_step_tokens and list(sizes) == sorted(set(sizes))
        assert {64 << i for i in range(6) if 64 << i < max_step_tokens} < set(sizes)
        for num_tokens in range(17, min(max_step_tokens, 256) + 1):
            size = bucket(num_tokens, sizes)
            most = size / 3 if max_step_tokens >= 128 else size / 2
            assert size - num_tokens < most, (max_step_tokens, num_tokens)


def test_an_unknown_way_of_bringing_pages_back_is_refused():
    """The check also applies to a configuration without a runtime, as in a simulation."""
    sizes = {"page_size": 4, "num_pages": 9, "max_slots": 2, "max_context": 32}
    with pytest.raises(InvalidConfigError, match="restore='later' is unknown; .*'per_layer'"):
        EngineConfig(**sizes, max_step_tokens=16, restore="later")
