"""The instruction sets that C++ kernels can be compiled for on this machine."""

from __future__ import annotations

import platform
from pathlib import Path


def instruction_sets() -> dict[str, tuple[str, ...]]:
    """Return the flags of the compiler for each: the machine's own, and AVX2 where it has more."""
    found = {"native": ()}
    if _has("avx2"):
        found["avx2"] = ("-march=haswell",)
    return found


def has_bfloat16_products() -> bool:
    """Return whether this machine's own instructions multiply bfloat16 numbers."""
    return _has("avx512_bf16")


def _has(feature: str) -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    is_x86 = platform.machine() == "x86_64" and cpuinfo.exists()
    return is_x86 and f" {feature} " in cpuinfo.read_text()
