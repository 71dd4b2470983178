"""The public signatures of operations on each row, and the choice of their implementation.

Unless stated otherwise, `implementation` is "cpu" on the CPU if a compiler is found, and "xla"
elsewhere or if that refuses; "triton" is for NVIDIA GPUs and by name only. With "cpu" and "triton"
the bits of a row do not depend on the other rows. Errors are as in `dispatch`.
"""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxserve.kernels import dispatch
from jaxserve.kernels.pointwise import cpu, xla

Implementation = Literal["xla", "cpu"]
# For the operations that add up a row.
SumImplementation = Literal["xla", "cpu", "triton", "triton_interpreted"]

_PREFERRED = {"cpu": ("cpu",)}


def rms_norm(
    x: Float[Array, "*rows width"],
    scale: Float[Array, " width"],
    *,
    eps: float,
    offset: float = 0.0,
    implementation: SumImplementation | None = None,
) -> Float[Array, "*rows width"]:
    """Return x / sqrt(mean(x^2) + eps) * (scale + offset) over the last axis, in x's dtype.

    It computes in float32 (Zhang and Sennrich, arXiv:1910.07467).
    """
    if x.ndim < 1 or scale.shape != x.shape[-1:]:
        raise ValueError(f"x{x.shape} and scale{scale.shape} do not fit; pass [..., n] and [n]")
    return dispatch.call(
        "rms_norm",
        {"xla": xla.rms_norm, "cpu": cpu.rms_norm, **dispatch.by_triton("pointwise", "rms_norm")},
        _PREFERRED,
        implementation,
        x=x,
        scale=scale,
        eps=eps,
        offset=offset,
    )


def layer_norm(
    x: Float[Array, "*rows width"],
    scale: Float[Array, " width"],
    bias: Float[Array, " width"],
    *,
    eps: float,
    implementation: SumImplementation | None = None,
) -> Float[Array, "*rows width"]:
    """Return (x - mean(x)) / sqrt(variance(x) + eps) * scale + bias over the last axis.

    It computes in float32 and returns x's dtype (Ba et al., arXiv:1607.06450).
    """
    if x.ndim < 1 or {scale.shape, bias.shape} != {x.shape[-1:]}:
        raise ValueError(
            f"x{x.shape}, scale{scale.shape} and bias{bias.shape} do not fit; pass [..., n] and "
            "twice [n]"
        )
    return dispatch.call(
        "layer_norm",
        {
            "xla": xla.layer_norm,
            "cpu": cpu.layer_norm,
            **dispatch.by_triton("pointwise", "layer_norm"),
        },
        _PREFERRED,
        implementation,
        x=x,
        scale=scale,
        bias=bias,
        eps=eps,
    )


def log_sum_exp(
    x: Float32[Array, "rows width"], *, implementation: SumImplementation | None = None
) -> Float32[Array, " rows"]:
    """Return log(sum(exp(x))) over the last axis, without overflow.

    "triton" is the choice on NVIDIA GPUs.
    """
    if x.ndim != 2:
        raise ValueError(f"x{x.shape} does not fit; pass [rows, width]")
    return dispatch.call(
        "log_sum_exp",
        {
            "xla": xla.log_sum_exp,
            "cpu": cpu.log_sum_exp,
            **dispatch.by_triton("pointwise", "log_sum_exp"),
        },
        {**_PREFERRED, "cuda": ("triton",)},
        implementation,
        x=x,
    )


def gated_silu(
    x: Float[Array, "rows 2 width"], *, implementation: Implementation | None = None
) -> Float[Array, "rows width"]:
    """Return silu(x[:, 0]) * x[:, 1] (SwiGLU without its products; Shazeer, arXiv:2002.05202)."""
    if x.ndim != 3 or x.shape[1] != 2:
        raise ValueError(f"x{x.shape} does not fit; pass [rows, 2, width]")
    return dispatch.call(
        "gated_silu",
        {"xla": xla.gated_silu, "cpu": cpu.gated_silu},
        _PREFERRED,
        implementation,
        x=x,
    )


def row_maximum(
    x: Float32[Array, "rows width"],
    *,
    implementation: Literal["xla", "triton", "triton_interpreted"] | None = None,
) -> tuple[Int32[Array, " rows"], Float32[Array, " rows"], Bool[Array, " rows"]]:
    """Return the index (lowest of equals) and the value of each row's maximum, and has_nan.

    has_nan says which rows have a NaN, or infinities of both signs; with "triton" only NaNs. The
    index of such a row is any within the width, and its value is undefined. `implementation` is
    "triton" on NVIDIA GPUs, and "xla" elsewhere or if that refuses.
    """
    if x.ndim != 2:
        raise ValueError(f"x{x.shape} does not fit; pass [rows, width]")
    return dispatch.call(
        "row_maximum",
        {"xla": xla.row_maximum, **dispatch.by_triton("pointwise", "row_maximum")},
        {"cuda": ("triton",)},
        implementation,
        x=x,
    )
