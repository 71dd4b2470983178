"""The GPU that kernels are compiled for, and what Triton's kernels require of it and of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import jax
import jax.numpy as jnp

from jaxserve.kernels import dispatch

# Maximum bytes of shared memory of a block, by compute capability: CUDA's programming guide,
# "Technical specifications per compute capability".
_SHARED_BYTES: Mapping[tuple[int, int], int] = MappingProxyType(
    {capability: 227 << 10 for capability in ((9, 0), (10, 0), (10, 3), (11, 0))}
    | {capability: 163 << 10 for capability in ((8, 0), (8, 7))}
)
# The least of all others from sm_80 on: 8.6, 8.9, 12.0, 12.1.
_LEAST_SHARED_BYTES = 99 << 10


@final
@dataclass(frozen=True)
class Gpu:
    """A kind of NVIDIA GPU, as far as the kernels' tiles depend on it.

    Attributes:
      kind: its name in JAX.
      capability: compute capability, such as (9, 0).
      shared_bytes: maximum shared memory of a block.
      num_cores: number of multiprocessors.
    """

    kind: str
    capability: tuple[int, int]
    shared_bytes: int
    num_cores: int

    @property
    def has_mosaic(self) -> bool:
        """Whether the Mosaic kernels serve it: they are for Hopper."""
        return self.capability[0] == 9

    @classmethod
    def of(cls, device: Any) -> Gpu | None:
        """Return the description of a JAX device; None if it is not an NVIDIA GPU."""
        capability = getattr(device, "compute_capability", None)
        if device.platform not in ("gpu", "cuda") or "." not in str(capability):
            return None
        major, minor = map(int, str(capability).split("."))
        shared_bytes = getattr(device, "shared_memory_per_block_optin", None)
        return cls(
            device.device_kind,
            (major, minor),
            shared_bytes or _SHARED_BYTES.get((major, minor), _LEAST_SHARED_BYTES),
            device.core_count,
        )


# Kinds for which kernels are compiled on machines without them (`cross`, `make kernel-gate`). Of an
# absent GPU Pallas knows the compute capability by its name alone, and it knows neither an L40S nor
# an RTX 5090. These two have the names of GPUs with the same chip.
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 227 << 10, 132),
        "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 163 << 10, 108),
        "l40s": Gpu("NVIDIA L40", (8, 9), 99 << 10, 142),
        "h200": Gpu("NVIDIA H200", (9, 0), 227 << 10, 132),
        "b200": Gpu("NVIDIA B200", (10, 0), 227 << 10, 148),
        "rtx5090": Gpu("NVIDIA RTX PRO 6000", (12, 0), 99 << 10, 170),
    }
)


def target() -> Gpu | None:
    """Return the GPU that is compiled for; None if it is another platform, or unknown.

    It is the device of the current abstract mesh (see `cross`), or else JAX's first device.
    """
    device = jax.devices()[0]
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is None or abstract.device_kind == device.device_kind:
        return Gpu.of(device)
    return next((gpu for gpu in GPUS.values() if gpu.kind == abstract.device_kind), None)


def num_stages(wanted: int, stage_bytes: int, other_bytes: int = 0) -> int:
    """Return how many iterations of a loop may be in flight, at most `wanted`.

    Each has its own operands in shared memory, of which a block has as much as the device gives it.
    Where tensor cores read registers (8.x and 12.x), those of the present iteration have left it.

    Args:
      stage_bytes: operands that an iteration loads.
      other_bytes: what else the kernel has in shared memory.

    Raises:
      NotImplementedError: the device has no room for one.
    """
    gpu = target()
    if gpu is None:
        return wanted
    in_registers = gpu.capability[0] in (8, 12)
    room = (gpu.shared_bytes - other_bytes) // stage_bytes + in_registers
    if room < 1 + in_registers:
        raise NotImplementedError(
            f"a block needs {stage_bytes + other_bytes} bytes of shared memory, and {gpu.kind} has "
            f"{gpu.shared_bytes}"
        )
    return min(wanted, room)


def require_triton(written: jax.typing.DTypeLike | None = None) -> None:
    """Raise NotImplementedError unless the call is compiled for a GPU that Triton serves.

    The message names the platform or its compute capability. `written` is the dtype that the kernel
    converts numbers to.
    """
    platform = dispatch.target_platform()
    if platform != "cuda":
        raise NotImplementedError(f"it is compiled for NVIDIA GPUs, not for {platform}")
    gpu = target()
    capability = None if gpu is None else gpu.capability
    if capability is not None and capability < (8, 0):
        raise NotImplementedError(f"it needs sm_80 or newer, not compute capability {capability}")
    is_float8 = written is not None and jnp.dtype(written).name.startswith("float8")
    if is_float8 and capability is not None and capability < (8, 9):
        raise NotImplementedError(
            f"float8 needs sm_89 or newer, not compute capability {capability}"
        )


def require_addressable(*arrays: jax.Array | jax.ShapeDtypeStruct | None) -> None:
    """Raise NotImplementedError unless the offsets that Pallas computes for Triton reach every
    element.

    They are signed 32-bit element counts for arrays of up to 4 GiB, and 64-bit beyond, so an array
    of up to 4 GiB must have fewer than 2^31 elements.
    """
    for array in arrays:
        if array is not None and array.size >= 2**31 and array.size * array.dtype.itemsize <= 2**32:
            raise NotImplementedError(
                f"an array has {array.size:,} elements in {array.size * array.dtype.itemsize:,} "
                "bytes, and 32-bit offsets do not reach its last ones"
            )


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`; Triton's blocks have such sizes."""
    return 1 << (size - 1).bit_length()
