"""The public signatures of products with weights, and the choice of their implementation."""

from __future__ import annotations

from typing import Literal

import jax
from jaxtyping import Array, Float

from jaxserve.kernels import dispatch
from jaxserve.kernels.matmul import cpu, xla

Implementation = Literal["xla", "cpu", "triton", "triton_interpreted"]

_IMPLEMENTATIONS = {"xla": xla.matmul, "cpu": cpu.matmul, **dispatch.by_triton("matmul", "matmul")}
_PREFERRED = {"cpu": ("cpu",)}


def matmul(
    x: Float[Array, "tokens in"],
    weight: Float[Array, " rows *columns"],
    *,
    transposed: bool = False,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, " tokens *out"]:
    """Multiply `x` with a weight, without rearranging it, and accumulate in float32 or wider.

    Args:
      x: [tokens, in].
      weight: [in, ...out], or [out, in] with `transposed`.
      out_dtype: x's dtype by default.
      implementation: "cpu" on the CPU if a compiler is found, and "xla" elsewhere or if that
        refuses. Only "xla" can be partitioned over a mesh. "triton" is for NVIDIA GPUs and by name
        only.

    Returns:
      [tokens, ...out]. With "cpu" and "triton", the bits of a row do not depend on the other rows
      or their number.

    Raises:
      NotImplementedError, ValueError: see `dispatch`.
    """
    is_matrix = weight.ndim == 2 if transposed else weight.ndim >= 2
    if x.ndim != 2 or not is_matrix or x.shape[1] != weight.shape[1 if transposed else 0]:
        raise ValueError(
            f"x{x.shape} and weight{weight.shape} do not fit; pass [tokens, in] and "
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
