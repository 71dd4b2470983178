"""Paged attention on the CPU: a C++ kernel (cpu.cc) that XLA calls on its own threads.

The call takes the whole cache as an operand and copies nothing.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from jaxserve.kernels import build, dispatch
from jaxserve.kernels.cpu_targets import PAGES
from jaxserve.kernels.paged_attention.operands import AttentionCall

_SOURCE = Path(__file__).with_name("cpu.cc")
_PAGES = ("float32", "bfloat16")
_SCALED_PAGES = ("int8", "float8_e4m3fn")


def paged_attention(call: AttentionCall) -> Float[Array, "tokens q_heads head_dim"]:
    """Implement `api.paged_attention`. Tokens in no row get zeros.

    The bits of a row's output do not depend on the rest of the batch. A row that reaches outside
    the batch, the page table or the cache fails the call at run time with XLA's InvalidArgument.
    """
    dispatch.require_cpu()
    _check_types(call)
    if call.alibi_slopes is not None and call.distance_bias is not None:
        raise NotImplementedError("it adds ALiBi or a bias by distance, not both")
    q, rows, window = call.q, call.rows, call.sliding_window
    if q.shape[2] % 8:
        raise NotImplementedError(f"head_dim must be a multiple of 8, not {q.shape[2]}")
    if window is not None and window < 1:
        raise NotImplementedError(f"a sliding window of {window} sees nothing")
    target = build.cpu_target(_SOURCE, "PagedAttention", PAGES[str(call.k_pages.dtype)])
    # The kernel's threads divide the rows themselves, so it needs no plan.
    start = jnp.arange(q.shape[0]) if call.is_decode else rows.query_start
    nothing = jnp.zeros(0)
    kernel = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(q.shape, q.dtype))
    return kernel(
        q,
        call.k_pages,
        call.v_pages,
        nothing if call.k_scales is None else call.k_scales,
        nothing if call.v_scales is None else call.v_scales,
        jnp.asarray(call.layer, jnp.int32),
        start.astype(jnp.int32),
        rows.query_length.astype(jnp.int32),
        rows.first_position.astype(jnp.int32),
        rows.context_length.astype(jnp.int32),
        rows.page_table.astype(jnp.int32),
        _bias(call.alibi_slopes, call.distance_bias, nothing),
        nothing if call.sinks is None else call.sinks.astype(jnp.float32),
        scale=np.float32(call.scale),
        soft_cap=np.float32(call.soft_cap or 0.0),
        window=np.int32(window or 0),
    )


def _bias(
    alibi_slopes: Float[Array, " q_heads"] | None,
    distance_bias: Float[Array, "q_heads distances"] | None,
    nothing: Float32[Array, " none"],
) -> Float32[Array, " numbers"]:
    """Return one operand for both: slopes, one per head, or biases, two or more per head."""
    if alibi_slopes is not None:
        return alibi_slopes.astype(jnp.float32)
    if distance_bias is None:
        return nothing
    if distance_bias.shape[1] == 1:
        distance_bias = jnp.repeat(distance_bias, 2, axis=1)
    return distance_bias.astype(jnp.float32).reshape(-1)


def _check_types(call: AttentionCall) -> None:
    pages = _PAGES if call.k_scales is None else _SCALED_PAGES
    q, k, v = call.q.dtype, call.k_pages.dtype, call.v_pages.dtype
    if str(q) != "float32" or k != v or str(k) not in pages:
        raise NotImplementedError(
            f"it serves float32 queries with pages in {' or '.join(_PAGES)}, or with scales in "
            f"{_SCALED_PAGES}, not {q} with {k} and {v}"
            + ("" if call.k_scales is None else " and scales")
        )
