"""A layer's product with the norm before it, and the gate and the residual stream after it.

On GPUs a step of few tokens computes them in one kernel (`jaxserve.kernels.fused_matmul`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32

from jaxserve.kernels import RMSScale, dispatch, fused_matmul, gated_silu
from jaxserve.models.linear import FIXED_TILES, Linear
from jaxserve.models.norms import Norm, RMSNorm
from jaxserve.sharding import fitted_spec
from jaxserve.sharding.shards import num_tensor_shards, over_tensor, sum_over_tensor

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
    """Return gate(linear(norm(x))) + residual; all except the product are optional."""
    if linear.row_kernels is not None:
        return _by_rows(linear, normed(x, norm), gate, residual)
    is_fusable = (
        isinstance(linear.weight, nnx.Variable)
        and not linear.transposed
        and (norm is None or isinstance(norm, RMSNorm))
        and gate in (None, gated_silu)
    )
    if is_fusable and dispatch.target_platform() == "cuda":
        scale = norm.as_scale if isinstance(norm, RMSNorm) else None
        return fused(linear, x, scale, gate is not None, residual)
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


def _by_rows(
    linear: Linear,
    x: Float[Array, "tokens *in"],
    gate: Gate | None,
    residual: Float[Array, " tokens *kept"] | None,
) -> Float[Array, " tokens *kept"]:
    """Return gate(linear(x)) + residual by row kernels, on one device, or NotImplementedError."""
    if not isinstance(linear.weight, nnx.Variable) or linear.transposed:
        raise NotImplementedError(f"row kernels of a {type(linear.weight).__name__}")
    num_in, is_fused = x.ndim - 1, gate in (None, gated_silu)
    weight = linear.weight[...]
    out = fused_matmul(
        x.reshape(x.shape[0], -1),
        weight.reshape(-1, *weight.shape[num_in:]),
        bias=None if linear.bias is None else linear.bias[...],
        is_gated=gate is gated_silu,
        residual=residual if is_fused else None,
        implementation=FIXED_TILES[linear.row_kernels],
    )
    return out if gate is None or is_fused else with_residual(residual, gate(out))


def fused(
    linear: Linear,
    x: Float[Array, "tokens *in"],
    norm: RMSScale | None,
    is_gated: bool,
    residual: Float[Array, " tokens *kept"] | None,
) -> Float[Array, " tokens *kept"]:
    """Return the fused product of a dense weight, on one device or on a mesh.

    Shards of a weight's columns fuse everything in their kernel. The results of shards of its
    inputs are summed before the bias and the residual stream are added.
    """
    weight = linear.weight[...]
    bias = None if linear.bias is None else linear.bias[...]
    num_in = x.ndim - 1
    names = linear.weight.get_metadata()["logical_axes"]
    sizes = jax.sharding.get_abstract_mesh().shape
    spec = tuple(fitted_spec(sizes, weight.shape, names[len(names) - weight.ndim :]))
    ins, outs = spec[:num_in], spec[num_in:]
    num_shares = num_tensor_shards() if any(ins) else 1

    def own(
        x: Float[Array, "tokens *in"],
        weight: Float[Array, " *in *out"],
        norm: RMSScale | None,
        bias: Array | None,
        residual: Array | None,
    ) -> Float[Array, " tokens *kept"]:
        product = partial(
            fused_matmul,
            x.reshape(x.shape[0], -1),
            weight.reshape(-1, *weight.shape[num_in:]),
            norm=norm,
        )
        if num_shares == 1:
            return product(bias=bias, is_gated=is_gated, residual=residual)
        out = sum_over_tensor(product(), num_shares)
        out = out if bias is None else out + bias
        return with_residual(residual, gated_silu(out) if is_gated else out)

    kept = P(None, *(outs[1:] if is_gated else outs))
    mapped = over_tensor(
        own, in_specs=(P(None, *ins), P(*spec), P(), P(*outs), kept), out_specs=kept
    )
    return mapped(x, weight, norm, bias, residual)
