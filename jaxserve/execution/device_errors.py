"""Conversion of device failures to typed errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxserve.core.errors import DeviceMemoryError, GpuUnusedError
from jaxserve.core.gpus import has_nvidia_gpu

_CUDA_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
# Settings of JAX with which a user chooses a platform or a device.
_CHOICES = ("jax_platforms", "jax_platform_name", "jax_default_device")


def check_gpu_is_used(
    environ: Mapping[str, str],
    settings: Mapping[str, Any],  # of JAX
    root: Path = Path("/"),  # of the file system
) -> None:
    """Raise GpuUnusedError if JAX computes on the CPU unasked on a machine with an NVIDIA GPU.

    JAX only warns there. This starts its devices.
    """
    import jax  # engines are simulated without it

    if jax.default_backend() != "cpu" or any(settings[name] for name in _CHOICES):
        return
    if not has_nvidia_gpu(environ, root):
        return
    if any(map(_is_installed, _CUDA_PLUGINS)):
        found = f"its CUDA plug-in failed: {_why_not_cuda()}"
        remedy = (
            "Install versions that belong together (pip install -e '.[cuda13]' in a checkout of "
            "jaxserve, or '.[cuda12]' for drivers before CUDA 13)"
        )
    else:
        found = "its CUDA plug-in is not installed"
        remedy = (
            "Install it (pip install -e '.[cuda13]' in a checkout of jaxserve, or '.[cuda12]' for "
            "drivers before CUDA 13)"
        )
    raise GpuUnusedError(
        f"this machine has an NVIDIA GPU, and JAX would compute on the CPU, because {found}. "
        f"{remedy}, or set JAX_PLATFORMS=cpu to compute on the CPU"
    )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package of all plug-ins
        return False


def _why_not_cuda() -> str:
    import jax

    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return str(error).partition("\n")[0].rstrip(".")
    return "it has no devices"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error says that memory could not be allocated, by XLA or by jaxserve."""
    return isinstance(error, DeviceMemoryError) or _is_by_xla(error)


def _is_by_xla(error: BaseException) -> bool:
    """Return whether XLA could not allocate memory; it has no type for that."""
    return "RESOURCE_EXHAUSTED" in str(error)


@contextmanager
def out_of_memory_as(doing: str, remedy: str) -> Iterator[None]:
    """Raise XLA's out-of-memory error as a `DeviceMemoryError` with an operation and a remedy."""
    try:
        yield
    except Exception as error:  # the module of XLA's type differs between versions
        if not _is_by_xla(error):
            raise
        raise DeviceMemoryError(
            f"the device ran out of memory while {doing} ({error}); {remedy}"
        ) from error
