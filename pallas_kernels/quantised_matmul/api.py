"""The public signature of the product with a packed weight, and the choice of implementation."""

from __future__ import annotations

from typing import Literal

import jax
from jaxtyping import Array, Float

from jaxserve.kernels import dispatch
from jaxserve.kernels.quantised_matmul import cpu, xla
from jaxserve.kernels.quantised_matmul.packing import PANEL, PackedMatrix, Rounding

Implementation = Literal["xla", "cpu", "triton", "triton_interpreted"]

_IMPLEMENTATIONS = {
    "xla": xla.quantised_matmul,
    "cpu": cpu.quantised_matmul,
    **dispatch.by_triton("quantised_matmul", "quantised_matmul"),
}
_PREFERRED = {"cpu": ("cpu",), "cuda": ("triton",)}


def quantised_matmul(
    x: Float[Array, "tokens in"],
    weight: PackedMatrix,
    *,
    rounds_activations: Rounding | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, " tokens *lead out"]:
    """Multiply `x` with a weight in eight or four bits; accumulate in float32.

    Args:
      weight: [in, *lead, out], packed.
      rounds_activations: round `x` to int8 first, with a scale for each group of a row, or for each
        token; None does not round them.
      out_dtype: x's dtype by default.
      implementation: "cpu" on the CPU for activations that are rounded by groups, "triton" on
        NVIDIA GPUs, and "xla" elsewhere or if these refuse. Only "xla" can be partitioned over a
        mesh.

    Returns:
      [tokens, *lead, panels * 16], the number of columns of the weight's panels. With "cpu" and
      "triton", the bits of a row do not depend on the other rows.

    Raises:
      NotImplementedError, ValueError: see `dispatch`.
    """
    if x.ndim != 2 or not weight.depth - weight.group < x.shape[1] <= weight.depth:
        raise ValueError(
            f"x{x.shape} and a weight of {weight.depth} rows, in groups of {weight.group}, do not "
            "fit; pass [tokens, in]"
        )
    out = dispatch.call(
        "quantised_matmul",
        _IMPLEMENTATIONS,
        _PREFERRED,
        implementation,
        x=x,
        codes=weight.codes,
        weight=weight,
        rounds_activations=rounds_activations,
        out_dtype=x.dtype if out_dtype is None else out_dtype,
    )
    *lead, panels, _ = weight.channels.shape
    return out.reshape(x.shape[0], *lead, panels * PANEL)
