"""The public signature of products by groups, and the choice of their implementation."""

from __future__ import annotations

from functools import partial
from typing import Literal

from jaxtyping import Array, Float, Int32

from jaxserve.kernels import dispatch
from jaxserve.kernels.matmul import cpu, xla

Implementation = Literal[
    "xla", "cpu", "triton", "triton_interpreted", "triton_rows", "triton_rows_interpreted"
]

_TRITON = dispatch.by_triton("grouped_matmul", "grouped_matmul")
_IMPLEMENTATIONS = {
    "xla": xla.grouped_matmul,
    "cpu": cpu.grouped_matmul,
    **_TRITON,
    "triton_rows": partial(_TRITON["triton"], batch_invariant=True),
    "triton_rows_interpreted": partial(_TRITON["triton_interpreted"], batch_invariant=True),
}
_PREFERRED = {"cpu": ("cpu",), "cuda": ("triton",)}


def grouped_matmul(
    x: Float[Array, "tokens in"],
    weight: Float[Array, " matrices in out"],
    sizes: Int32[Array, " matrices"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "tokens out"]:
    """Multiply adjacent tokens of `x` with one matrix per group.

    The first `sizes[0]` tokens belong to matrix 0, the next `sizes[1]` to matrix 1, and so on.
    Tokens after the last group get zeros.

    Args:
      implementation: "triton" on NVIDIA GPUs, "cpu" on the CPU if a compiler is found, and "xla"
        elsewhere or if these refuse. "xla" multiplies all tokens with every matrix, except on TPUs.
        "triton_rows" is by name only: that of "triton" with one tile for any number of tokens.

    Returns:
      [tokens, out] in x's dtype, accumulated in float32 or wider. With "cpu" and "triton_rows",
      the bits of a row depend on it and on its matrix only; with "triton", also on the number of
      tokens.

    Raises:
      NotImplementedError, ValueError: see `dispatch`.
    """
    if x.ndim != 2 or weight.ndim != 3 or (*sizes.shape, x.shape[1]) != weight.shape[:2]:
        raise ValueError(
            f"x{x.shape}, weight{weight.shape} and sizes{sizes.shape} do not fit; pass "
            "[tokens, in], [matrices, in, out] and [matrices]"
        )
    return dispatch.call(
        "grouped_matmul",
        _IMPLEMENTATIONS,
        _PREFERRED,
        implementation,
        x=x,
        weight=weight,
        sizes=sizes,
    )
