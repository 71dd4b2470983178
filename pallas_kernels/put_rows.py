"""Writes of rows into float8 arrays in place on a CPU.

XLA's own scatter would convert the whole array to float16 and back.
"""

from __future__ import annotations

from pathlib import Path

import jax
from jaxtyping import Array, Int, Shaped

from pallas_kernels import build, dispatch

_SOURCE = Path(__file__).with_suffix(".cc")


def serves(array: Shaped[Array, ...]) -> bool:
    """Return whether `put_rows` should write into `array`, in the current trace.

    False for dtypes that XLA scatters well, for other platforms, for an array that XLA partitions
    over a mesh, for 2^31 elements or more, and without a C++ compiler, which is logged as a
    warning.
    """
    if not array.dtype.name.startswith("float8") or dispatch.target_platform() != "cpu":
        return False
    if dispatch.is_partitioned() or array.size >= 2**31:
        return False
    try:
        build.cpu_target(_SOURCE, "PutRows")
    except NotImplementedError:
        return False
    return True


def put_rows(
    array: Shaped[Array, "*all"], place: Int[Array, " count"], rows: Shaped[Array, " count *row"]
) -> Shaped[Array, "*all"]:
    """Return `array` with some rows replaced; in place when it is donated.

    Args:
      array: [..., *row]; `serves(array)` must hold.
      place: int32 [count], row numbers in memory order; numbers out of range are skipped.
      rows: [count, *row], of the array's dtype.
    """
    call = jax.ffi.ffi_call(
        build.cpu_target(_SOURCE, "PutRows"),
        jax.ShapeDtypeStruct(array.shape, array.dtype),
        input_output_aliases={0: 0},
    )
    return call(array, place, rows)
