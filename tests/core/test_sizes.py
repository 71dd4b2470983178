"""Sizes of memory, parsed and formatted."""

from __future__ import annotations

import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.sizes import format_bytes, parse_bytes

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [(7, 7), ("7", 7), ("4GiB", 4 << 30), ("512 mib", 512 << 20), ("1.5GB", 1_500_000_000)],
)
def test_sizes_are_read(size, num_bytes):
    """Bytes and units of powers of 1000 and of 1024 are parsed, in either case."""
    assert parse_bytes(size) == num_bytes


@pytest.mark.parametrize(
    "size", ["", "GiB", "-1", "0", 0, -5, "4 gigs", "1e9", "0.1B", "9" * 400, 10**400]
)
def test_other_sizes_are_refused(size):
    """Anything else is a typed error that shows how to write a size."""
    with pytest.raises(InvalidConfigError, match="4GiB"):
        parse_bytes(size)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB")]
)
def test_sizes_are_written(num_bytes, text):
    """The unit is the largest one for which the number is at least one."""
    assert format_bytes(num_bytes) == text
