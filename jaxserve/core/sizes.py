"""Sizes of memory as text, such as "4GiB"."""

from __future__ import annotations

import re
import reprlib

from jaxserve.core.errors import InvalidConfigError

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}
_SPELLING = {unit.lower(): unit for unit in _UNITS}


def parse_bytes(size: int | str) -> int:
    """Parse a size such as 4294967296, "4GiB", "512 MiB" or "1.5GB" (powers of 1000) to bytes.

    Raises:
      InvalidConfigError: `size` is in another form, or less than one byte.
    """
    found = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-zA-Z]*)\s*", str(size))
    unit = _SPELLING.get(found[2].lower()) if found else None
    num_bytes = int(float(found[1]) * _UNITS[unit]) if found and unit is not None else 0
    if num_bytes < 1:
        raise InvalidConfigError(
            f"{reprlib.repr(size)} is not a size of memory; pass bytes, or a number and a unit "
            'such as "4GiB"'
        )
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """Format a size such as "1.5 GiB", in the largest unit (powers of 1024) of at least 1."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
