"""The fused product in its parts, for every platform, dtype and sharding."""

from __future__ import annotations

from jaxtyping import Array, Float

from jaxserve.kernels.fused_matmul.operands import RMSScale
from jaxserve.kernels.matmul import matmul
from jaxserve.kernels.pointwise import gated_silu, rms_norm


def fused_matmul(
    x: Float[Array, "tokens in"],
    weight: Float[Array, " in *out"],
    *,
    norm: RMSScale | None,
    bias: Float[Array, " *out"] | None,
    is_gated: bool,
    residual: Float[Array, " tokens *kept"] | None,
) -> Float[Array, " tokens *kept"]:
    if norm is not None:
        x = rms_norm(x, norm.scale, eps=norm.eps, offset=norm.offset)
    out = matmul(x, weight)
    if bias is not None:
        out = out + bias.astype(out.dtype)
    if is_gated:
        out = gated_silu(out)
    return out if residual is None else residual + out
