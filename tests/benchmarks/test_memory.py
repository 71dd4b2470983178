"""`benchmarks.memory`: what a sequence holds beside what its layers need."""

from __future__ import annotations

import pytest

from benchmarks.memory import SHAPES, held_and_needed

pytestmark = pytest.mark.fast


def test_pages_behind_a_window_are_not_held():
    """At most 1.1 times as much as is needed; one group of all layers held 4.8 times at 8k."""
    for context in (1024, 8192):
        figures = held_and_needed(SHAPES["gemma-3-1b"], context)
        assert 1 <= figures["held"] <= 1.1
        assert figures["held"] <= figures["reserved"] <= 1.15
    assert figures["held_in_one_group"] > 4.5


def test_a_model_without_windows_has_one_group():
    figures = held_and_needed(SHAPES["llama-3-8b"], 1024)
    assert figures["held"] == figures["held_in_one_group"]
