"""Sizes of memory, written for people."""

from __future__ import annotations

import pytest

from jaxserve.core.sizes import format_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB")]
)
def test_sizes_are_written(num_bytes, text):
    """The largest unit that leaves at least one."""
    assert format_bytes(num_bytes) == text
