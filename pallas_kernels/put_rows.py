"""Writing rows of float8 arrays in place on a CPU, where XLA would compute all of it in float16."""

from __future__ import annotations

from pathlib import Path

import jax

from pallas_kernels import build, dispatch

_SOURCE = Path(__file__).with_suffix(".cc")


def serves(array: jax.Array) -> bool:
    """Whether `put_rows` is how to write into `array`, where this is traced.

    False where XLA does well by itself, for an array that XLA cuts over a mesh, and where there is
    no compiler, which is logged as a warning.
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


def put_rows(array: jax.Array, place: jax.Array, rows: jax.Array) -> jax.Array:
    """`array` with other rows at some places, in place when it is donated.

    Args:
      array: [..., *row], one that this `serves`.
      place: int32 [count], numbers of rows as they lie in memory; those outside are left out.
      rows: [count, *row], of the same dtype.
    """
    call = jax.ffi.ffi_call(
        build.cpu_target(_SOURCE, "PutRows"),
        jax.ShapeDtypeStruct(array.shape, array.dtype),
        input_output_aliases={0: 0},
    )
    return call(array, place, rows)
