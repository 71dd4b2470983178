"""The public signature of paged attention, and the choice of its implementation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from jaxtyping import Array, Float, Float32, Int, Real

from jaxserve.kernels import dispatch
from jaxserve.kernels.paged_attention import cpu, mosaic, reference, xla
from jaxserve.kernels.paged_attention.operands import AttentionCall, Rows
from jaxserve.kernels.paged_attention.planner import Plan

_Implementation = Callable[[AttentionCall], Float[Array, "tokens q_heads head_dim"]]


def _of_arguments(
    implementation: _Implementation,
) -> Callable[..., Float[Array, "tokens q_heads head_dim"]]:
    """Return the implementation as a function of the arguments, which the log of choices names."""
    return lambda **arguments: implementation(AttentionCall(**arguments))


_IMPLEMENTATIONS = {
    name: _of_arguments(implementation)
    for name, implementation in {
        "reference": reference.paged_attention,
        "xla": xla.paged_attention,
        "cpu": cpu.paged_attention,
        **dispatch.by_triton("paged_attention", "paged_attention"),
        "mosaic": mosaic.paged_attention,
        "mosaic_interpreted": partial(mosaic.paged_attention, interpret=True),
    }.items()
}
_PREFERRED = {"cpu": ("cpu",), "cuda": ("triton",)}

IMPLEMENTATIONS = tuple(_IMPLEMENTATIONS)

jax.tree_util.register_dataclass(
    Plan,
    data_fields=["tiles", "splits", "merges", "counts"],
    meta_fields=["tiling", "num_partials"],
)


def paged_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k_pages: Real[Array, "layers pages kv_heads page_size head_dim"],
    v_pages: Real[Array, "layers pages kv_heads page_size head_dim"],
    layer: int | Int[Array, ""],
    rows: Rows,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Float[Array, " q_heads"] | None = None,
    distance_bias: Float[Array, "q_heads distances"] | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    k_scales: Float32[Array, "layers pages kv_heads page_size"] | None = None,
    v_scales: Float32[Array, "layers pages kv_heads page_size"] | None = None,
    max_query_length: int | None = None,
    plan: Plan | None = None,
    implementation: str | None = None,
) -> Float[Array, "tokens q_heads head_dim"]:
    """Compute causal grouped-query attention of a flat ragged batch over paged keys and values.

    A query at position p sees the keys of its sequence at positions <= p, from any row; with a
    sliding window w, only those at positions > p - w. The softmax is in float32.

    Args:
      q: [tokens, q_heads, head_dim]; query head h reads KV head h // (q_heads // kv_heads).
      k_pages, v_pages: [layers, pages, kv_heads, page_size, head_dim].
      layer: index of the cache's layer; may be traced.
      rows: see `Rows`. The output of tokens in no row is undefined, but finite.
      scale: factor of the logits; 1 / sqrt(head_dim) by default.
      soft_cap: logits become soft_cap * tanh(logits / soft_cap).
      alibi_slopes: float32 [q_heads]; adds slope * (key position - query position).
      distance_bias: float32 [q_heads, distances]; adds the entry of the distance from the key to
        the query, or the last entry for longer distances (T5's relative positions).
      sinks: float32 [q_heads], a logit of each head that joins the softmax like that of a key whose
        value is zero (Xiao et al., "Attention sinks", arXiv:2309.17453, section 3.3).
      k_scales, v_scales: float32 [layers, pages, kv_heads, page_size], the factors of quantized
        pages (int8, float8); both or none.
      max_query_length: static bound on `rows.query_length`. 1 means a decode batch, in which token
        i is the only query of row i.
      plan: the work items of these rows, from `planner.plan`, for the GPU kernels. Rows may have
        shrunk since it was made.
      implementation: "cpu" on the CPU, "triton" on NVIDIA GPUs, and "xla" elsewhere or if those
        refuse; or any of `IMPLEMENTATIONS`, such as "mosaic,triton".

    Returns:
      [tokens, q_heads, head_dim] in q's dtype.

    Raises:
      NotImplementedError, ValueError: see `dispatch`.
    """
    _check_shapes(q, k_pages, v_pages, rows, max_query_length)
    _check_heads(q, alibi_slopes=alibi_slopes, sinks=sinks)
    _check_bias(q, distance_bias)
    _check_scales(k_pages, k_scales, v_scales)
    return dispatch.call(
        "paged_attention",
        _IMPLEMENTATIONS,
        _PREFERRED,
        implementation,
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        layer=layer,
        rows=rows,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        distance_bias=distance_bias,
        sinks=sinks,
        k_scales=k_scales,
        v_scales=v_scales,
        max_query_length=max_query_length,
        plan=plan,
    )


def _check_shapes(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, rows: Rows, max_query_length: int | None
) -> None:
    if q.ndim != 3 or k_pages.ndim != 5 or k_pages.shape != v_pages.shape:
        raise ValueError(
            f"q{q.shape}, k_pages{k_pages.shape} and v_pages{v_pages.shape} do not fit; pass "
            "[tokens, q_heads, head_dim] and twice [layers, pages, kv_heads, page_size, head_dim]"
        )
    if q.shape[2] != k_pages.shape[4] or q.shape[1] % k_pages.shape[2]:
        raise ValueError(
            f"q{q.shape} and k_pages{k_pages.shape} do not fit; head_dim must be equal, and "
            "q_heads a multiple of kv_heads"
        )
    if 0 in (*q.shape[1:], *k_pages.shape[2:]):
        raise ValueError(
            f"q{q.shape} and k_pages{k_pages.shape} have no heads or empty pages; sizes must be 1 "
            "or more"
        )
    sizes = (rows.query_start, rows.query_length, rows.first_position, rows.context_length)
    shapes = [x.shape for x in sizes]
    if rows.page_table.ndim != 2 or set(shapes) != {rows.page_table.shape[:1]}:
        raise ValueError(
            f"rows of {shapes} and page_table{rows.page_table.shape} do not fit; pass four times "
            "[rows] and [rows, pages]"
        )
    if max_query_length == 1 and q.shape[0] != rows.query_length.shape[0]:
        raise ValueError(
            f"max_query_length=1 needs one token per row, but there are {q.shape[0]} tokens and "
            f"{rows.query_length.shape[0]} rows"
        )


def _check_heads(q: jax.Array, **by_head: jax.Array | None) -> None:
    for name, given in by_head.items():
        if given is not None and given.shape != q.shape[1:2]:
            raise ValueError(
                f"{name}{given.shape} do not fit; pass one per query head, [{q.shape[1]}]"
            )


def _check_bias(q: jax.Array, distance_bias: jax.Array | None) -> None:
    if distance_bias is None:
        return
    shape = distance_bias.shape
    if len(shape) != 2 or shape[0] != q.shape[1] or not shape[1]:
        raise ValueError(
            f"distance_bias{shape} does not fit; pass one row per query head, "
            f"[{q.shape[1]}, distances]"
        )


def _check_scales(pages: jax.Array, k_scales: jax.Array | None, v_scales: jax.Array | None) -> None:
    if (k_scales is None) != (v_scales is None):
        raise ValueError("one of k_scales and v_scales is missing; pass both or none")
    for scales in (k_scales, v_scales):
        if scales is not None and scales.shape != pages.shape[:4]:
            raise ValueError(
                f"scales{scales.shape} do not fit; pass one per token and head, {pages.shape[:4]}"
            )
