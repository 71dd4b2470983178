"""The instruction sets that C++ kernels can be compiled for on this machine."""

from __future__ import annotations

import platform
from pathlib import Path


def instruction_sets() -> dict[str, tuple[str, ...]]:
    """Return the flags of the compiler for each: the machine's own, and AVX2 where it has more."""
    found = {"native": ()}
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() == "x86_64" and cpuinfo.exists() and " avx2 " in cpuinfo.read_text():
        found["avx2"] = ("-march=haswell",)
    return found
