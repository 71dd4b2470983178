"""The machine's NVIDIA GPUs, as far as this process may use them; found without JAX."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

# The fraction of a device's memory that JAX may use, read when its devices start. jaxlib refuses to
# start with both names set; the second is the older one.
MEMORY_VARIABLE = "XLA_CLIENT_MEM_FRACTION"
_MEMORY_VARIABLES = (MEMORY_VARIABLE, "XLA_PYTHON_CLIENT_MEM_FRACTION")
_ALLOCATOR_VARIABLE = "XLA_PYTHON_CLIENT_ALLOCATOR"
# What is left is for CUDA itself: its context, the kernels, and NCCL.
MEMORY_FRACTION = 0.92
_JAX_FRACTION = 0.75

# Values of `CUDA_VISIBLE_DEVICES` that hide all GPUs.
_NO_DEVICES = ("", "-1", "NoDevFiles")
_DEVICE_FILE = re.compile(r"nvidia\d+")


def reserve_memory(environ: MutableMapping[str, str]) -> None:
    """Let JAX use `MEMORY_FRACTION` of each GPU, unless the user has set a fraction."""
    if not any(environ.get(name) for name in _MEMORY_VARIABLES):
        environ[MEMORY_VARIABLE] = str(MEMORY_FRACTION)


def describe_memory(device: Any, environ: Mapping[str, str]) -> str:
    """Return a line about the memory that JAX may use of a `jax.Device` with statistics."""
    limit = device.memory_stats()["bytes_limit"]
    used = f"JAX may use {limit / 1e9:.3g} GB of {device}"
    given = [f"{name}={environ[name]}" for name in _MEMORY_VARIABLES if environ.get(name)]
    if given or environ.get(_ALLOCATOR_VARIABLE, "default") not in ("default", "bfc"):
        return f"{used} ({', '.join(given) or f'allocator {environ[_ALLOCATOR_VARIABLE]}'})"
    return (
        f"{used}, {_JAX_FRACTION:.0%} of it, which is JAX's default; with {MEMORY_VARIABLE}="
        f"{MEMORY_FRACTION} in the environment before JAX starts, about "
        f"{limit * MEMORY_FRACTION / _JAX_FRACTION / 1e9:.3g} GB"
    )


def has_nvidia_gpu(environ: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Return whether CUDA could use a GPU here: its device file exists and nothing hides it.

    The files of `/proc/driver/nvidia` do not count: a container without a GPU has those of its
    host. `root` is the root of the file system.
    """
    if environ.get("CUDA_VISIBLE_DEVICES") in _NO_DEVICES:
        return False
    try:
        names = [path.name for path in (root / "dev").iterdir()]
    except OSError:
        return False
    # Windows' subsystem for Linux has one device file for GPUs of all makers.
    is_windows = "dxg" in names and (root / "usr/lib/wsl/lib/nvidia-smi").exists()
    return is_windows or any(map(_DEVICE_FILE.fullmatch, names))
