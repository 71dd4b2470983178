"""The public signatures of norms and gated activations, and the choice of their implementation."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.pointwise import cpu, xla

Implementation = Literal["xla", "cpu"]

_PREFERRED = {"cpu": ("cpu",)}


def rms_norm(
    x: Float[Array, "*rows width"],
    scale: Float[Array, " width"],
    *,
    eps: float,
    offset: float = 0.0,
    implementation: Implementation | None = None,
) -> Float[Array, "*rows width"]:
    """Return x / sqrt(mean(x^2) + eps) * (scale + offset) over the last axis, in x's dtype.

    It computes in float32 (Zhang and Sennrich, arXiv:1910.07467).

    Args:
      implementation: overrides the platform's choice, which is made when the call is traced and
        logged once: "cpu" on the CPU if a compiler is found, and "xla" elsewhere or if that
        refuses.

    Raises:
      NotImplementedError: the requested implementation cannot serve this case.
      ValueError: the shapes contradict each other, or the implementation is unknown.
    """
    if x.ndim < 1 or scale.shape != x.shape[-1:]:
        raise ValueError(f"x{x.shape} and scale{scale.shape} do not fit; pass [..., n] and [n]")
    return dispatch.call(
        "rms_norm",
        {"xla": xla.rms_norm, "cpu": cpu.rms_norm},
        _PREFERRED,
        implementation,
        x=x,
        scale=scale,
        eps=eps,
        offset=offset,
    )


def gated_silu(
    x: Float[Array, "rows 2 width"], *, implementation: Implementation | None = None
) -> Float[Array, "rows width"]:
    """Return silu(x[:, 0]) * x[:, 1] (SwiGLU without its products; Shazeer, arXiv:2002.05202).

    Args:
      implementation: as in `rms_norm`.

    Raises:
      NotImplementedError: the requested implementation cannot serve this case.
      ValueError: the shape is another, or the implementation is unknown.
    """
    if x.ndim != 3 or x.shape[1] != 2:
        raise ValueError(f"x{x.shape} does not fit; pass [rows, 2, width]")
    return dispatch.call(
        "gated_silu",
        {"xla": xla.gated_silu, "cpu": cpu.gated_silu},
        _PREFERRED,
        implementation,
        x=x,
    )
