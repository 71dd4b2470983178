"""The public signature of the fused product, and the choice of its implementation."""

from __future__ import annotations

from functools import partial
from typing import Literal

from jaxtyping import Array, Float

from jaxserve.kernels import dispatch
from jaxserve.kernels.fused_matmul import rows, xla
from jaxserve.kernels.fused_matmul.operands import RMSScale

Implementation = Literal[
    "xla", "triton", "triton_interpreted", "triton_rows", "triton_rows_interpreted"
]

_IMPLEMENTATIONS = {
    "xla": xla.fused_matmul,
    **dispatch.by_triton("fused_matmul", "fused_matmul"),
    "triton_rows": rows.fused_matmul,
    "triton_rows_interpreted": partial(rows.fused_matmul, interpret=True),
}
_PREFERRED = {"cuda": ("triton",)}

IMPLEMENTATIONS = tuple(_IMPLEMENTATIONS)


def fused_matmul(
    x: Float[Array, "tokens in"],
    weight: Float[Array, " in *out"],
    *,
    norm: RMSScale | None = None,
    bias: Float[Array, " *out"] | None = None,
    is_gated: bool = False,
    residual: Float[Array, " tokens *kept"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, " tokens *kept"]:
    """Return gate(norm(x) @ weight + bias) + residual; each of the four may be missing.

    Sums are in float32. A kernel rounds once, at the end; "xla" rounds after each part.

    Args:
      norm: see `rms_norm`.
      is_gated: the weight is [in, 2, out], and the result is silu(first) * second, [tokens, out].
      residual: added to the result, with the same shape.
      implementation: "triton" on NVIDIA GPUs, for few tokens in bfloat16, and "xla", the parts one
        after the other, elsewhere or if that refuses. "triton_rows" is by name only: it serves any
        number of tokens and every dtype of `matmul`, and gives a row the same bits in any batch.

    Raises:
      NotImplementedError, ValueError: see `dispatch`.
    """
    out = weight.shape[1:]
    kept = out[1:] if is_gated else out
    if x.ndim != 2 or weight.ndim < 2 or x.shape[1] != weight.shape[0]:
        raise ValueError(
            f"x{x.shape} and weight{weight.shape} do not fit; pass [tokens, in] and [in, ...out]"
        )
    if is_gated and (len(out) != 2 or out[0] != 2):
        raise ValueError(f"weight{weight.shape} has no gates; pass [in, 2, out]")
    for name, given, wanted in (
        ("norm.scale", None if norm is None else norm.scale, x.shape[1:]),
        ("bias", bias, out),
        ("residual", residual, (x.shape[0], *kept)),
    ):
        if given is not None and given.shape != wanted:
            raise ValueError(f"{name}{given.shape} does not fit; pass {wanted}")
    return dispatch.call(
        "fused_matmul",
        _IMPLEMENTATIONS,
        _PREFERRED,
        implementation,
        x=x,
        weight=weight,
        norm=norm,
        bias=bias,
        is_gated=is_gated,
        residual=residual,
    )
