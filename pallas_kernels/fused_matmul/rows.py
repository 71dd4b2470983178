"""The fused product whose rows have the same bits in any batch, on NVIDIA GPUs from sm_80 on.

It runs the kernel of the norm, then that of `matmul.triton`, which takes any number of tokens.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from jaxserve.kernels.fused_matmul.operands import RMSScale
from jaxserve.kernels.pointwise import rms_norm


def fused_matmul(
    x: Float[Array, "tokens in"],
    weight: Float[Array, " in *out"],
    *,
    norm: RMSScale | None,
    bias: Float[Array, " *out"] | None,
    is_gated: bool,
    residual: Float[Array, " tokens *kept"] | None,
    interpret: bool = False,
) -> Float[Array, " tokens *kept"]:
    """Implement `api.fused_matmul`; it rounds after the norm and at the end."""
    from jaxserve.kernels.matmul.triton import rowwise_product  # imports Pallas

    if norm is not None:
        x = rms_norm(
            x,
            norm.scale,
            eps=norm.eps,
            offset=norm.offset,
            implementation="triton_interpreted" if interpret else "triton",
        )
    out = rowwise_product(
        x,
        weight.reshape(weight.shape[0], -1),
        out_dtype=x.dtype,
        bias=None if bias is None else bias.reshape(-1),
        is_gated=is_gated,
        residual=None if residual is None else residual.reshape(x.shape[0], -1),
        interpret=interpret,
    )
    return out.reshape(x.shape[0], *weight.shape[1 + is_gated :])
