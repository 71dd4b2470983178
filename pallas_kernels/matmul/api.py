"""The public signature of the product with a weight, and which implementation serves it."""

from __future__ import annotations

from typing import Literal

import jax

from pallas_kernels import dispatch
from pallas_kernels.matmul import cpu, xla

Implementation = Literal["xla", "cpu"]

_IMPLEMENTATIONS = {"xla": xla.matmul, "cpu": cpu.matmul}
_PREFERRED = {"cpu": ("cpu",)}


def matmul(
    x: jax.Array,
    weight: jax.Array,
    *,
    transposed: bool = False,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """`x` times a weight as it lies in memory, accumulated in float32 (or wider).

    Args:
      x: [tokens, in].
      weight: [in, ...out], or [out, in] with `transposed`.
      out_dtype: x's by default.
      implementation: overrides the platform's choice, made when the call is traced and logged
        once: on the CPU "cpu", where a compiler is found; else "xla", which alone partitions.

    Returns:
      [tokens, ...out]. By "cpu", bits of a row do not depend on the other rows or their number.

    Raises:
      NotImplementedError: the implementation asked for cannot serve this case; says why.
      ValueError: the shapes contradict each other, or the implementation is unknown.
    """
    is_matrix = weight.ndim == 2 if transposed else weight.ndim >= 2
    if x.ndim != 2 or not is_matrix or x.shape[1] != weight.shape[1 if transposed else 0]:
        raise ValueError(
            f"x{x.shape} and weight{weight.shape}: expected [tokens, in] and "
            f"{'[out, in]' if transposed else '[in, ...out]'}"
        )
    return dispatch.call(
        "matmul",
        _IMPLEMENTATIONS,
        _PREFERRED,
        implementation,
        x=x,
        weight=weight,
        transposed=transposed,
        out_dtype=x.dtype if out_dtype is None else out_dtype,
    )
