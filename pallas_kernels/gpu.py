"""What a GPU kernel that Triton compiles asks of the device and of its arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch


def require_triton(written: jax.typing.DTypeLike | None = None) -> None:
    """What is compiled for is a GPU that Triton serves.

    Args:
      written: a dtype that numbers are converted to.

    Raises:
      NotImplementedError: it is not; says what it is.
    """
    platform = dispatch.target_platform()
    if platform != "cuda":
        raise NotImplementedError(f"compiled for NVIDIA GPUs, not for {platform}")
    capability = dispatch.compute_capability()
    if capability is not None and capability < (8, 0):
        raise NotImplementedError(f"sm_80 or newer, not compute capability {capability}")
    is_float8 = written is not None and jnp.dtype(written).name.startswith("float8")
    if is_float8 and capability is not None and capability < (8, 9):
        raise NotImplementedError(f"float8 from sm_89 on, not on compute capability {capability}")


def require_addressable(*arrays: jax.Array | None) -> None:
    """Every element is found by the offsets that Pallas computes for Triton.

    They count elements in 32 bits with a sign, and in 64 only from 4 GiB on.

    Raises:
      NotImplementedError: elements of one byte lie past the first 2 GiB of less than 4.
    """
    for array in arrays:
        if array is not None and array.size >= 2**31 and array.nbytes <= 2**32:
            raise NotImplementedError(
                f"an array of {array.size:,} elements in {array.nbytes:,} bytes, whose last ones "
                "its offsets do not reach"
            )


def power_of_two(size: int) -> int:
    """The least one that is not below `size`, as Triton has its arrays."""
    return 1 << (size - 1).bit_length()
