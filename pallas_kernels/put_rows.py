"""In-place writes of rows into arrays on a CPU.

XLA's own scatter writes one row at a time in a loop of several operations each, and converts a
whole float8 array to float16 and back.
"""

from __future__ import annotations

from pathlib import Path

import jax
from jaxtyping import Array, Int, Shaped

from jaxserve.kernels import build, dispatch

_SOURCE = Path(__file__).with_suffix(".cc")


def serves(array: Shaped[Array, ...]) -> bool:
    """Return whether `put_rows` should write pages into `array`, in the current trace.

    False for dtypes other than float8, which have a kernel of their own, and where it cannot.
    """
    return array.dtype.name.startswith("float8") and can_put_rows(array)


def can_put_rows(array: Shaped[Array, ...]) -> bool:
    """Return whether `put_rows` can write into `array`, in the current trace.

    False on other platforms, for an array that XLA partitions over a mesh, for an array without
    elements or with at least 2^31, and without a C++ compiler, which is logged as a warning.
    """
    if dispatch.target_platform() != "cpu" or dispatch.is_partitioned():
        return False
    if not 0 < array.size < 2**31:
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
      array: [..., *row]; `can_put_rows(array)` must hold.
      place: int32 [count], row numbers in memory order; numbers out of range are skipped.
      rows: [count, *row], of the array's dtype.
    """
    call = jax.ffi.ffi_call(
        build.cpu_target(_SOURCE, "PutRows"),
        jax.ShapeDtypeStruct(array.shape, array.dtype),
        input_output_aliases={0: 0},
    )
    return call(array, place, rows)
