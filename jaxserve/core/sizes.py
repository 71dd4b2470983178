"""Sizes of memory as people read them."""

from __future__ import annotations


def format_bytes(num_bytes: int) -> str:
    """Such as "1.5 GiB": the largest unit (powers of 1024) that leaves at least one."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
