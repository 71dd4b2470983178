"""The public signature of attention over whole sequences, and the choice of its implementation."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Float

from jaxserve.kernels import dispatch
from jaxserve.kernels.kv_write import RopeTables
from jaxserve.kernels.whole_attention import cpu, xla

Implementation = Literal["xla", "cpu"]

_IMPLEMENTATIONS = {"xla": xla.whole_attention, "cpu": cpu.whole_attention}
_PREFERRED = {"cpu": ("cpu",)}


def whole_attention(
    qkv: Float[Array, "tokens kv_heads columns head_dim"],
    tables: RopeTables | None,
    *,
    length: int,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: tuple[float, ...] | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "tokens q_heads head_dim"]:
    """Compute causal grouped-query attention of whole sequences; differentiable.

    Args:
      qkv: the tokens of all sequences, one sequence after the other. `columns` is group + 2: each
        KV head's queries, its key, its value.
      tables: cosines and sines of the tokens' positions, as in `rotate_and_write`; None for no
        rotation.
      length: length of each sequence.
      scale, sliding_window, soft_cap, alibi_slopes, sinks: as in `paged_attention`.
      implementation: "cpu" on the CPU if a compiler is found, and "xla" elsewhere or if that
        refuses.

    Returns:
      [tokens, kv_heads * group, head_dim] in qkv's dtype. With "cpu", the bits of a token are the
      same as with `paged_attention`, in any steps.

    Raises:
      NotImplementedError, ValueError: see `dispatch`.
    """
    if qkv.ndim != 4 or qkv.shape[2] < 3 or length < 1 or qkv.shape[0] % length:
        raise ValueError(
            f"qkv{qkv.shape} and length={length} do not fit; pass [sequences * length, kv_heads, "
            "group + 2, head_dim]"
        )
    return dispatch.call(
        "whole_attention",
        _IMPLEMENTATIONS,
        _PREFERRED,
        implementation,
        qkv=qkv,
        tables=tables,
        length=length,
        scale=qkv.shape[-1] ** -0.5 if scale is None else scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
