"""Sizes of memory as people write and read them."""

from __future__ import annotations

import re

from jaxserve.core.errors import InvalidConfigError

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}


def parse_bytes(size: int | str) -> int:
    """A number of bytes from 4294967296, "4GiB", "512 MiB" or "1.5GB" (powers of 1000).

    Raises:
      InvalidConfigError: anything else, or less than one byte.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", str(size))
    unit = _UNITS.get(found[2].lower()) if found else None
    num_bytes = int(float(found[1]) * unit) if found and unit else 0
    if num_bytes < 1:
        raise InvalidConfigError(
            f'{size!r} is not a size of memory; give bytes, or a number and a unit such as "4GiB"'
        )
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """Such as "1.5 GiB": the largest unit (powers of 1024) that leaves at least one."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
