"""Conversion of device failures to typed errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxserve.core.errors import DeviceMemoryError, GpuUnusedError, is_out_of_memory
from jaxserve.core.gpus import has_nvidia_gpu

_CUDA_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
# Settings of JAX with which a user chooses a platform or a device.
_CHOICES = ("jax_platforms", "jax_platform_name", "jax_default_device")
_INSTALL = (
    "(pip install -e '.[cuda13]' in a checkout of jaxserve, or '.[cuda12]' for drivers before "
    "CUDA 13)"
)
_ON_CPU = "or set JAX_PLATFORMS=cpu to compute on the CPU"


def check_gpu_is_used(
    environ: Mapping[str, str],
    settings: Mapping[str, Any],  # of JAX
    root: Path = Path("/"),  # of the file system
    start: Callable[[], str] | None = None,  # starts JAX's devices; returns their platform
) -> None:
    """Raise GpuUnusedError if JAX cannot use an NVIDIA GPU, or uses the CPU unasked beside one.

    JAX only warns if it finds no working plug-in. This starts its devices.
    """
    import jax  # engines are simulated without it

    try:
        platform = (start or jax.default_backend)()
    except RuntimeError as error:
        if "'cuda'" not in str(error):
            raise
        raise GpuUnusedError(
            f"JAX cannot start an NVIDIA GPU: {_first_line(error)}. Install versions that belong "
            f"together {_INSTALL}, end other processes that take the GPU's memory, {_ON_CPU}"
        ) from error
    if platform != "cpu" or any(settings[name] for name in _CHOICES):
        return
    if not has_nvidia_gpu(environ, root):
        return
    found, remedy = "its CUDA plug-in is not installed", f"Install it {_INSTALL}"
    if plugins := [each for each in _CUDA_PLUGINS if _is_installed(each)]:
        found = f"its CUDA plug-in failed: {_why_not_cuda(plugins[0])}"
        remedy = f"Install versions that belong together {_INSTALL}"
    raise GpuUnusedError(
        f"this machine has an NVIDIA GPU, and JAX would compute on the CPU, because {found}. "
        f"{remedy}, {_ON_CPU}"
    )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package of all plug-ins
        return False


def _why_not_cuda(plugin: str) -> str:
    """Return why a plug-in did not start; JAX has logged that, and gone on."""
    import jax

    try:
        import_module(plugin).initialize()
    except Exception as error:  # it loads and checks NVIDIA's libraries
        if "ALREADY_EXISTS" not in str(error):  # it has started, and JAX found no device for it
            return _first_line(error)
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return _first_line(error)
    return "it has no devices"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


@contextmanager
def out_of_memory_as(doing: str, remedy: str) -> Iterator[None]:
    """Raise XLA's out-of-memory error as a `DeviceMemoryError` with an operation and a remedy."""
    try:
        yield
    except Exception as error:  # the module of XLA's type differs between versions
        if isinstance(error, DeviceMemoryError) or not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(
            f"the device ran out of memory while {doing} ({error}); {remedy}"
        ) from error
