"""The public signature of low-rank changes of products, and the choice of the implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from jaxtyping import Array, Float, Float32, Int32

from jaxserve.kernels import dispatch
from jaxserve.kernels.low_rank import cpu, xla

Implementation = Literal["xla", "cpu"]

_IMPLEMENTATIONS = {"xla": xla.add_low_rank, "cpu": cpu.add_low_rank}
_PREFERRED = {"cpu": ("cpu",)}


def add_low_rank(
    out: Float[Array, "tokens out"],
    x: Float[Array, "tokens in"],
    a: Float[Array, " adapters in ranks"],
    b: Float[Array, "adapters rank out"],
    scale: Float32[Array, " adapters"],
    adapter: Int32[Array, " tokens"],
    *,
    spans: Sequence[tuple[int, int]] = (),
    implementation: Implementation | None = None,
) -> Float[Array, "tokens out"]:
    """Return `out[t] + (scale[i] * (x[t] @ a[i])) @ b[i]` with i = adapter[t] (LoRA).

    If a weight consists of several that each have a low-rank change, `a` has the columns of all
    changes in order, and each column of `b` belongs to one change.

    Args:
      out: products of `x` with the weight that adapters change.
      a, b: in the dtype of `x`, or in bfloat16, which is widened where it is multiplied.
      adapter: adapter of each token; -1 for none, which leaves the row of `out` unchanged.
      spans: for each run of columns of `b`, in order: the number of its change, and its length. By
        default all columns belong to the only change.
      implementation: "cpu" on the CPU if a compiler is found, and "xla" elsewhere or if that
        refuses.

    Returns:
      [tokens, out] in the dtype of `out`. With "cpu", the bits of a row depend on it and on its
      adapter only.

    Raises:
      NotImplementedError, ValueError: see `dispatch`.
    """
    num, width, ranks = a.shape
    shapes = (*out.shape, *x.shape, *b.shape, *scale.shape, *adapter.shape)
    tokens, (rank, columns) = x.shape[0], b.shape[1:]
    spans = tuple(spans) or ((0, columns),)
    changes = 1 + max(change for change, _ in spans)
    if (
        shapes != (tokens, columns, tokens, width, num, rank, columns, num, tokens)
        or ranks != changes * rank
        or sum(size for _, size in spans) != columns
    ):
        raise ValueError(
            f"out{out.shape}, x{x.shape}, a{a.shape}, b{b.shape}, scale{scale.shape}, "
            f"adapter{adapter.shape} and spans of {changes} change(s) do not fit; pass [tokens, "
            "out], [tokens, in], [adapters, in, changes * rank], [adapters, rank, out], "
            "[adapters], [tokens] and spans of all columns of b"
        )
    return dispatch.call(
        "add_low_rank",
        _IMPLEMENTATIONS,
        _PREFERRED,
        implementation,
        out=out,
        x=x,
        a=a,
        b=b,
        scale=scale,
        adapter=adapter,
        spans=spans,
    )
