"""Requirements of kernels that Triton compiles, on the device and on the arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.kernels import dispatch


def require_triton(written: jax.typing.DTypeLike | None = None) -> None:
    """Raise NotImplementedError unless the call is compiled for a GPU that Triton serves.

    The message names the platform or its compute capability. `written` is the dtype that the kernel
    converts numbers to.
    """
    platform = dispatch.target_platform()
    if platform != "cuda":
        raise NotImplementedError(f"it is compiled for NVIDIA GPUs, not for {platform}")
    capability = dispatch.compute_capability()
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
