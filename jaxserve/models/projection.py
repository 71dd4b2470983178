"""A product of a layer with its norm before it, and its gate and the residual stream behind it.

On GPUs a step of few tokens computes them in one kernel (`pallas_kernels.fused_matmul`).
"""

from __future__ import annotations

from collections.abc import Callable

from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxserve.models.linear import Linear
from jaxserve.models.norms import Norm, RMSNorm
from pallas_kernels import RMSScale, dispatch, fused_matmul, gated_silu

Gate = Callable[[Float[Array, "tokens 2 out"]], Float[Array, "tokens out"]]


def projected(
    linear: Linear,
    x: Float[Array, "tokens *in"],
    adapter: Int32[Array, " tokens"] | None,
    *,
    norm: Norm | None = None,
    gate: Gate | None = None,
    residual: Float[Array, " tokens *kept"] | None = None,
) -> Float[Array, " tokens *kept"]:
    """Return gate(linear(norm(x))) + residual; all but the product may be missing."""
    is_fusable = (
        isinstance(linear.weight, nnx.Variable)
        and not linear.transposed
        and (norm is None or isinstance(norm, RMSNorm))
        and gate in (None, gated_silu)
    )
    if is_fusable and dispatch.target_platform() == "cuda":
        weight = linear.weight[...]
        return fused_matmul(
            x.reshape(x.shape[0], -1),
            weight.reshape(-1, *weight.shape[x.ndim - 1 :]),
            norm=RMSScale(norm.scale[...], norm.eps, norm.offset)
            if isinstance(norm, RMSNorm)
            else None,
            bias=None if linear.bias is None else linear.bias[...],
            is_gated=gate is not None,
            residual=residual,
        )
    out = linear(normed(x, norm), adapter)
    return with_residual(residual, out if gate is None else gate(out))


def normed(x: Float[Array, "tokens *in"], norm: Norm | None) -> Float[Array, "tokens *in"]:
    """Return `norm(x)`, or `x` itself without a norm."""
    return x if norm is None else norm(x)


def with_residual(
    residual: Float[Array, " tokens *out"] | None, out: Float[Array, " tokens *out"]
) -> Float[Array, " tokens *out"]:
    """Return residual + out, or `out` itself without a residual."""
    return out if residual is None else residual + out
